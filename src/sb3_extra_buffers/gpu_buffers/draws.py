"""``np.random.randint`` compiled: the same numbers and the same state afterwards, in a quarter of the time.

Import through :func:`sb3_extra_buffers.compiled.load_kernels` only.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from sb3_extra_buffers.codecs.base import Indices

_SIZE, _SHIFT = 624, 397
State = npt.NDArray[np.uint32]
"""The 624 words of a Mersenne Twister, and how many of them have been used."""


def randint(high: int, n: int) -> Indices:
    """``np.random.randint(0, high, size=n)``."""
    generator = np.random.mtrand._rand._bit_generator
    if type(generator) is not np.random.MT19937 or not 0 < high < 1 << 32:
        return np.random.randint(0, high, size=n)
    out = np.empty(n, dtype=np.int64)
    with generator.lock:
        draw(_state_of(generator), high, out)
    return out


@functools.lru_cache(maxsize=1)
def _state_of(generator: Any) -> State:
    """The memory in which a generator keeps its state."""
    memory = (ctypes.c_uint32 * (_SIZE + 1)).from_address(generator.ctypes.state_address)
    return np.ctypeslib.as_array(memory)


@njit(cache=True)
def _refill(state: State) -> None:
    for i in range(_SIZE):
        bits = (state[i] & np.uint32(0x80000000)) | (state[(i + 1) % _SIZE] & np.uint32(0x7FFFFFFF))
        odd = np.uint32(0x9908B0DF) if bits & np.uint32(1) else np.uint32(0)
        state[i] = state[(i + _SHIFT) % _SIZE] ^ (bits >> np.uint32(1)) ^ odd
    state[_SIZE] = 0


@njit(cache=True)
def draw(state: State, high: int, out: Indices) -> None:
    """Draw numbers below ``high``: as many bits as its largest one has, again and again until they are not above it."""
    highest = np.uint32(high - 1)
    if highest == 0:
        out[:] = 0
        return
    mask = highest
    for shift in (1, 2, 4, 8, 16):
        mask |= mask >> np.uint32(shift)
    for i in range(out.shape[0]):
        while True:
            if state[_SIZE] == _SIZE:
                _refill(state)
            bits = state[state[_SIZE]]
            state[_SIZE] += np.uint32(1)
            bits ^= bits >> np.uint32(11)
            bits ^= (bits << np.uint32(7)) & np.uint32(0x9D2C5680)
            bits ^= (bits << np.uint32(15)) & np.uint32(0xEFC60000)
            bits ^= bits >> np.uint32(18)
            bits &= mask
            if bits <= highest:
                break
        out[i] = bits


def compile_all() -> None:
    draw(np.zeros(_SIZE + 1, dtype=np.uint32), 1, np.zeros(1, dtype=np.int64))
