"""Closing buffers on disk when the process ends: normally, by an exception, ``sys.exit()`` or Ctrl-C."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sb3_extra_buffers.compressed.base import BaseCompressedBuffer

_opened: weakref.WeakSet[BaseCompressedBuffer] = weakref.WeakSet()
_prepared_in = 0
"""The process that closes its buffers when it ends. One that was forked from it has to prepare for itself."""


def close_at_exit(buffer: BaseCompressedBuffer) -> None:
    global _prepared_in
    _opened.add(buffer)
    if _prepared_in == os.getpid():
        return
    atexit.register(_close_all)
    if multiprocessing.parent_process() is not None:
        # Its processes end without calling what atexit has.
        multiprocessing.util.Finalize(None, _close_all, exitpriority=0)
    _prepared_in = os.getpid()


def close_unattended(buffer: BaseCompressedBuffer) -> None:
    """Close a buffer that its user has not closed, unless the user has removed its folder instead."""
    folder = buffer._folder
    if folder is None or not folder.is_open:
        return
    if folder.path.is_dir():
        buffer.close()
    else:
        folder.close()


def is_open_here(path: Path) -> bool:
    """Whether a buffer of this process has this folder."""
    folders = (buffer._folder for buffer in list(_opened))
    return any(folder is not None and folder.is_open and _same(folder.path, path) for folder in folders)


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _close_all() -> None:
    """Those that other processes have opened, before they forked this one, know that they are not to be closed here."""
    first_error = None
    for buffer in list(_opened):
        try:
            close_unattended(buffer)
        except Exception as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error
