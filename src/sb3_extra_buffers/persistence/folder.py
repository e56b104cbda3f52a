"""Buffers whose observations are on disk (``storage="mmap"``).

The folder of such a buffer holds one file per store with the bytes of its arena, mapped into memory, and ``state``, a
:mod:`.container` with everything else, as of the last flush. Bytes that ``state`` refers to are not overwritten before
the next flush, so that ``state`` stays valid even if the process is killed.

A folder belongs to one buffer of one process at a time, which locks its file ``lock``. A forked process cannot use the
buffer: it can neither add nor flush, and the lock stays with the process that took it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import logging
import multiprocessing
import multiprocessing.util
import os
import secrets
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError, SaveError
from sb3_extra_buffers.persistence import container
from sb3_extra_buffers.persistence.container import Container
from sb3_extra_buffers.persistence.disk import sync_directory
from sb3_extra_buffers.persistence.files import STATE, as_corrupt, describe
from sb3_extra_buffers.state import SavedState
from sb3_extra_buffers.storage.arena import Arena
from sb3_extra_buffers.storage.extent_arena import ExtentArena, is_arena_name
from sb3_extra_buffers.storage.memory import FileMemory, open_own, zeros_in_file

_LOCK = "lock"
_WORTH_A_FLUSH = 16 << 20
"""With fewer dead bytes in an arena, a flush is not worth its time."""

logger = logging.getLogger("sb3_extra_buffers")


class BufferFolder:
    """The folder of one buffer.

    SB3's ``load`` creates a buffer with the arguments of the saved model, even if the model is only evaluated. So the
    constructor raises no error if the folder is in use, or holds a buffer of another kind. Instead, the new buffer is
    *detached*: it is empty, never changes the folder, and raises an error that says why as soon as it is used.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))  # noqa: PTH100  # stays valid if the working directory changes; keeps links
        self.is_ready = False
        """Whether the contents of the folder have been loaded. Before that, a flush would overwrite them."""
        self._process = os.getpid()
        self._problem: str | None = None
        """Why the buffer is detached; ``None`` if it is not."""
        self._closed_at: tuple[int, ...] | None = None
        """The stamp of the folder when the buffer was closed."""
        self._new_files: list[Path] = []
        """Files of this buffer's arenas, to be removed if it is detached."""
        self._lock = FileLock(self.path / _LOCK, timeout=0, thread_local=False)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                # Some versions of filelock truncate the file. If it is a link, that would destroy another file.
                open_own(self.path / _LOCK).close()
            self._lock.acquire()
        except Timeout:
            self._detach(
                f"{self.path} is in use by another buffer, of this process or another one. Close that buffer and open "
                "this one again, or choose another path."
            )
        except CorruptDataError as error:
            self._detach(str(error))
        except OSError as error:
            self._detach(f"{self.path} cannot be used: {error.strerror or error}. Choose another path.")

    @property
    def is_open(self) -> bool:
        """Whether the buffer can be changed and flushed."""
        return self.is_ready and self._lock.is_locked and self._process == os.getpid()

    def arena_maker(self, key: str) -> Callable[[], Arena]:
        """A function that creates an empty arena for the store of ``key``. Each call creates a new file."""
        if self._problem is not None:
            return Arena
        # File names have at most 255 bytes, and quote() takes nine for a Chinese character.
        return functools.partial(self._new_arena, quote(key, safe="")[:128] or "observations")

    def _new_arena(self, name: str) -> ExtentArena:
        # Always a new name: ``state`` may still refer to older files.
        path = self.path / f"{name}.{secrets.token_hex(4)}.arena"
        self._new_files.append(path)
        return ExtentArena(FileMemory(path))

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An array of zeros in a temporary file instead of memory. Flushes copy it to ``state``."""
        return np.zeros(shape, dtype) if self._problem is not None else zeros_in_file(self.path, shape, dtype)

    def before_adding(self, buffer: Any) -> None:
        """Flush if many bytes of a file are dead, so that they are used again before the file grows."""
        self._check_open()
        for arena in _arenas(buffer):
            if arena.held_bytes > max(_WORTH_A_FLUSH, arena.live_bytes // 8):
                self.flush(buffer)

    def before_reading(self) -> None:
        """Raise an error if the buffer is unusable, or closed and another buffer has changed its folder since."""
        self.check_usable()
        if self._closed_at is not None and self._closed_at != self._stamp():
            raise ConfigurationError(
                f"The buffer in {self.path} is closed, and its folder has changed since. Open it again with load()."
            )

    def check_usable(self) -> None:
        """Raise an error unless the folder belongs to this buffer in this process."""
        if self._problem is not None:
            raise ConfigurationError(self._problem)
        if self._process != os.getpid():
            raise ConfigurationError(
                f"{self.path} belongs to process {self._process}, and this process is a fork of it. Use the buffer "
                "there, or close it there and open it here with load()."
            )

    def flush(self, buffer: Any) -> None:
        """Write the contents of ``buffer`` to the folder."""
        self._check_open()
        arenas = _arenas(buffer)
        if not self.holds(buffer):
            # The folder may have been made anew by another buffer, whose files a flush would remove.
            raise SaveError(
                f"{self.path} could not be written: its files were removed or moved while the buffer was open. To keep "
                "the buffer, save() it to another path."
            )
        try:
            for arena in arenas:
                arena.memory.flush()
            sync_directory(self.path)  # for files that are new
        except OSError as error:
            raise SaveError(f"{self.path} could not be written: {error}. Its last flush is still valid.") from error
        meta, arrays = describe(buffer)
        kept = {name: array for name, array in arrays.items() if not name.endswith("/arena/bytes")}
        container.write(self.path / STATE, meta, kept)
        # From here on, nothing on disk refers to dead bytes or to replaced arenas.
        for arena in arenas:
            arena.release_held()
        self._remove_all_but({arena.memory.path for arena in arenas})

    def holds(self, buffer: Any) -> bool:
        """Whether the files of the buffer's arenas, whose names are unique, are still in the folder."""
        return all(arena.memory.path.exists() for arena in _arenas(buffer))

    def reopen(self, buffer: Any) -> None:
        """Load the contents of the folder, if it has any, into a new buffer."""
        if self._problem is not None:
            return
        try:
            differing = self._restore(buffer)
        except BaseException as error:
            # A buffer that was restored in part must never be flushed.
            self._detach(f"{self.path} could not be opened: {error}")
            raise
        if differing:
            buffer.pos, buffer.full = 0, False
            self._detach(differing)
            return
        self._remove_all_but({arena.memory.path for arena in _arenas(buffer)})
        self.is_ready = True
        _close_at_exit(buffer)

    def _restore(self, buffer: Any) -> str | None:
        """Load the contents of the folder. If they do not fit this buffer, change nothing and return the reason."""
        state = self.path / STATE
        try:
            open_own(state).close()
        except FileNotFoundError:
            return None
        with Container.open(state) as file, as_corrupt(state):
            own, _ = describe(buffer)
            differing = _differences(own, file.meta, inspect.signature(type(buffer)))
            if differing:
                return (
                    f"{self.path} holds a buffer that was made with other arguments: {', '.join(differing)}. "
                    f"Use {file.meta.get('class')}.load() to open it, or choose another path."
                )
            buffer._restore(SavedState(file, file.meta["state"]))
        paths = [arena.memory.path for arena in _arenas(buffer)]
        if len(set(paths)) < len(paths):
            raise CorruptDataError(f"{state} is corrupt: several stores are in the same file.")
        return None

    def close(self) -> None:
        """Unlock the folder for others."""
        if self._process == os.getpid():
            self._closed_at = self._stamp()
            self._lock.release()

    def _detach(self, problem: str) -> None:
        logger.info("%s", problem)
        self._problem = problem
        for path in self._new_files:
            with contextlib.suppress(OSError):  # Windows cannot remove a file that is mapped
                path.unlink()
        self._lock.release()

    def _check_open(self) -> None:
        self.check_usable()
        if not self.is_open:
            raise ConfigurationError(f"The buffer in {self.path} is closed. Open it again with load().")

    def _stamp(self) -> tuple[int, ...]:
        """Identifies the newest flush: the result changes with every flush that writes anything."""
        try:
            found = (self.path / STATE).stat()
        except OSError:
            return ()
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _remove_all_but(self, used: set[Path]) -> None:
        for path in self.path.glob("*.arena"):
            if path not in used and is_arena_name(path.name):
                with contextlib.suppress(OSError):
                    path.unlink()


def close_unattended(buffer: Any) -> None:
    """Close a buffer that its user has not closed, unless the user has removed or moved its folder."""
    folder: BufferFolder | None = buffer._folder
    if folder is None or not folder.is_open:
        return
    if folder.holds(buffer):
        buffer.close()
    else:
        folder.close()


_opened: weakref.WeakSet[Any] = weakref.WeakSet()
"""Buffers on disk, to be closed when the process ends: normally, by an exception, ``sys.exit()`` or Ctrl-C."""
_registered_process = 0
"""The id of the process that will close its buffers when it ends. A forked process has to prepare that again."""


def _close_at_exit(buffer: Any) -> None:
    global _registered_process
    _opened.add(buffer)
    if _registered_process == os.getpid():
        return
    atexit.register(_close_all)
    if multiprocessing.parent_process() is not None:
        # Processes that multiprocessing started end without calling atexit functions.
        multiprocessing.util.Finalize(None, _close_all, exitpriority=0)
    _registered_process = os.getpid()


def _close_all() -> None:
    """Close all buffers of this process. Buffers that the parent of a fork has opened are not open here."""
    first_error = None
    for buffer in list(_opened):
        try:
            close_unattended(buffer)
        except Exception as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error


def _arenas(buffer: Any) -> list[Any]:
    return [frames.arena for store in buffer._stores.values() for frames in store.frame_stores]


def _differences(own: dict[str, Any], saved: dict[str, Any], signature: inspect.Signature) -> list[str]:
    if own["class"] != saved.get("class"):
        return [f"class {saved.get('class')}"]
    arguments = saved.get("arguments")
    arguments = arguments if isinstance(arguments, dict) else {}
    # An argument that did not exist in the version that wrote the file has its default value.
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    return [name for name, value in own["arguments"].items() if arguments.get(name, defaults.get(name)) != value]
