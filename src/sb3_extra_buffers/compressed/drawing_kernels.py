"""Compiled form of :mod:`.drawing`. Import through :func:`sb3_extra_buffers.compiled.load_kernels` only."""

from __future__ import annotations

from numba import njit, types

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.codecs.memory_kernels import INT, INTS_2D, call


@njit(cache=True)
def draw(next_uint32: int, state: int, highest: int, highest_of_last: int, numbers: Indices) -> None:
    """Draw numbers from 0 to ``highest`` by rejection sampling, as NumPy's ``RandomState`` does.

    Draw as many bits as ``highest`` has, until their value is at most ``highest``.

    :param next_uint32: The address of a C function that draws 32 bits.
    :param state: The address of its argument, the state of the generator.
    :param highest_of_last: Replaces ``highest`` for the last row of ``numbers``.
    """
    for row in range(numbers.shape[0]):
        if row == numbers.shape[0] - 1:
            highest = highest_of_last
        mask = highest
        for shift in (1, 2, 4, 8, 16):
            mask |= mask >> shift
        for i in range(numbers.shape[1]):
            found = 0
            if highest > 0:
                found = call(next_uint32, (state,)) & mask
                while found > highest:
                    found = call(next_uint32, (state,)) & mask
            numbers[row, i] = found


def compile_all() -> None:
    if not draw.signatures:
        draw.compile(types.none(INT, INT, INT, INT, INTS_2D))
        draw.disable_compile()
