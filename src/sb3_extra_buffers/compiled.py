"""Loads kernels that numba compiles. numba is optional, slow to import and slow to compile.

A kernel module defines ``compile_all()``, which calls each of its functions once on tiny arrays. If several threads
need a module at the same time, they call it one after the other.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from importlib.util import find_spec
from types import ModuleType

logger = logging.getLogger("sb3_extra_buffers")
_compiling = threading.RLock()


def has_numba() -> bool:
    """Whether numba is installed, which compiles ``rle-jit`` and speeds up ``delta``."""
    return find_spec("numba") is not None


@functools.cache
def load_kernels(module: str) -> ModuleType | None:
    """The compiled kernels of ``module``, or ``None`` without numba.

    Only the very first call on a machine compiles; numba keeps the result on disk.
    """
    if not has_numba():
        return None
    notice = threading.Timer(3.0, _announce)
    notice.daemon = True
    notice.start()
    try:
        with _compiling:
            kernels = importlib.import_module(module)
            kernels.compile_all()
    finally:
        notice.cancel()
    return kernels


@functools.cache
def _announce() -> None:
    logger.warning("Compiling kernels. This happens once, takes some seconds, and is cached on disk.")
