"""Draw random slots and environments like SB3: the same numbers, from NumPy's global generator.

Most of the time of ``np.random.randint`` is overhead per call. A compiled loop over the generator's own C function
draws the same numbers, and leaves the generator in the same state.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.interruption import uninterrupted

_KERNELS = "sb3_extra_buffers.compressed.drawing_kernels"
_HAS_INT64 = np.dtype(int).itemsize == 8
"""Whether ``randint`` draws ``int64``. On Windows, that depends on NumPy's version."""


def draw_places(buffer: Any, n: int) -> tuple[Indices, Indices]:
    """Draw the slots and environments of ``n`` transitions. Reads only the sizes and the position of ``buffer``."""
    n_slots, pos = int(buffer.buffer_size), int(buffer.pos)
    if not buffer.full:
        slots, envs = _draw((pos, buffer.n_envs), n)
    elif not buffer.optimize_memory_usage:
        slots, envs = _draw((n_slots, buffer.n_envs), n)
    else:  # the newest next observation has overwritten the observation at pos
        slots, envs = _draw((n_slots - 1, buffer.n_envs), n)
        slots = (1 + slots + pos) % n_slots
    return slots, envs


def draw(high: int, n: int) -> Indices:
    """``np.random.randint(0, high, size=n)``."""
    (numbers,) = _draw((high,), n)
    return numbers


def _draw(highs: tuple[int, ...], n: int) -> Iterable[Indices]:
    """Draw numbers below each of one or two limits. A call for two limits takes hardly longer than for one."""
    # Do not load numba just for this: buffers of vectors work without it, and it takes a lot of memory.
    kernels = load_kernels(_KERNELS) if "numba" in sys.modules and _HAS_INT64 else None
    if kernels is None or not (0 < highs[0] < 1 << 32 and 0 < highs[-1] < 1 << 32):
        return [np.random.randint(0, high, size=n) for high in highs]
    numbers: Indices = np.empty((len(highs), n), dtype=np.int64)
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # it has no type stubs
    # Otherwise Ctrl-C could leave the lock held, and the next draw anywhere in the program would deadlock.
    with uninterrupted(), generator.lock:
        kernels.draw(*_next_uint32_of(generator), highs[0] - 1, highs[-1] - 1, numbers)
    return numbers


@functools.lru_cache(maxsize=1)
def _next_uint32_of(generator: Any) -> tuple[int, int]:
    """The addresses of the C function that draws 32 bits, and of its argument."""
    interface = generator.ctypes
    return ctypes.cast(interface.next_uint32, ctypes.c_void_p).value or 0, interface.state_address
