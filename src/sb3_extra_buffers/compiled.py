"""Load kernels compiled by numba. numba is optional, and takes long to import and to compile.

A kernel module defines ``compile_all()``, which calls each of its functions once on tiny arrays.
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
    """Whether numba is installed. ``rle-jit`` needs it, and other codecs are much faster with it."""
    return find_spec("numba") is not None


@functools.cache
def load_kernels(module: str) -> ModuleType | None:
    """Import ``module`` and compile its kernels. Returns ``None`` if numba is not installed.

    Only the first call on a machine compiles: numba caches the result on disk. Threads that need kernels at the same
    time wait for each other.
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
    logger.warning("Compiling kernels. This takes some seconds and happens once: numba caches them on disk.")
