"""Random slots and environments, drawn as SB3 draws them: by NumPy's global generator.

``np.random.randint`` spends most of its time on preparations. A compiled loop over the generator's own C function draws
the same numbers and leaves the same state behind.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import numpy as np

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.interruption import uninterrupted

_KERNELS = "sb3_extra_buffers.compressed.drawing_kernels"
_HAS_INT64 = np.dtype(int).itemsize == 8
"""Whether ``randint`` draws ``int64``. On Windows, that depends on NumPy's version."""


def draw_slots(buffer: Any, n: int) -> Indices:
    """The slots of ``n`` transitions. Of the buffer, only its sizes and its position are needed."""
    n_slots, pos = int(buffer.buffer_size), int(buffer.pos)
    if buffer.optimize_memory_usage and buffer.full:  # the slot at the position has no next observation
        return (1 + draw(n_slots - 1, n) + pos) % n_slots
    return draw(n_slots if buffer.full else pos, n)


def draw(high: int, n: int) -> Indices:
    """``np.random.randint(0, high, size=n)``."""
    # Vectors need no kernels, and numba takes a lot of memory.
    kernels = load_kernels(_KERNELS) if "numba" in sys.modules and _HAS_INT64 else None
    if kernels is None or not 0 < high < 1 << 32:
        return np.random.randint(0, high, size=n)
    numbers = np.empty(n, dtype=np.int64)
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # it has no type stubs
    # Without this, Ctrl-C could leave the lock locked, and the next draw anywhere in the program would wait for ever.
    with uninterrupted(), generator.lock:
        kernels.draw(*_functions_of(generator), high - 1, numbers)
    return numbers


@functools.lru_cache(maxsize=1)
def _functions_of(generator: Any) -> tuple[int, int]:
    """The addresses of the C function that draws 32 bits, and of its argument."""
    interface = generator.ctypes
    return ctypes.cast(interface.next_uint32, ctypes.c_void_p).value or 0, interface.state_address
