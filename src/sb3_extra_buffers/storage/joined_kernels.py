"""The compiled form of :mod:`.joined`. Import through :func:`sb3_extra_buffers.compiled.load_kernels` only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit, types

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.codecs.memory_kernels import INT, INTS, INTS_2D, address, copy, load32

_ROWS = types.uint8[:, ::1]


@njit(types.void(INTS_2D, INTS, INTS, INTS, types.uint8[::1], INT), nogil=True, cache=True)
def take_rows(
    addresses: Indices, sizes: Indices, numbers: Indices, places: Indices, out: Bytes, alignment: int
) -> None:
    """Copy row ``places[i]`` of the array at ``addresses[field, numbers[i]]``, for each field and each ``i``.

    :param sizes: The bytes of a row of each field.
    :param alignment: In ``out``, the rows of each field begin at a multiple of this many bytes.
    """
    target, n = address(out), len(numbers)
    for field in range(len(sizes)):
        size = sizes[field]
        for i in range(n):
            copy(target + i * size, addresses[field, numbers[i]] + places[i] * size, size)
        target += (n * size + alignment - 1) // alignment * alignment


@njit(
    types.void(INTS_2D, INTS_2D, INT, INTS, INTS, INTS, types.boolean, INTS, _ROWS, _ROWS),
    nogil=True,
    cache=True,
)
def take_observations(
    addresses: Indices,
    newest: Indices,
    n_envs: int,
    numbers: Indices,
    envs: Indices,
    slots: Indices,
    from_index: bool,
    next_slots: Indices,
    out: Bytes,
    next_out: Bytes,
) -> None:
    """Copy observations in ``slots``, and next observations in ``next_slots``, from plain stores.

    :param addresses: For each store, the addresses of its rows and of its index of next observations.
    :param newest: For each store, its newest slot, and the first row of that slot's next observations.
    :param from_index: Whether to look up next observations in the index. If not, they are the observations in
        ``next_slots``.
    """
    size, target, next_target = out.shape[1], address(out), address(next_out)
    for i in range(len(numbers)):
        number, env, slot = numbers[i], envs[i], next_slots[i]
        rows, index, row = addresses[0, number], addresses[1, number], slot * n_envs + env
        copy(target + i * size, rows + (slots[i] * n_envs + env + 1) * size, size)
        if not from_index:
            row += 1
        elif slot == newest[0, number]:
            row = newest[1, number] + env
        else:
            row = load32(index + 4 * row)
        copy(next_target + i * size, rows + row * size, size)


@njit(types.void(INTS, INTS, INTS, INTS, types.uint8[::1]), nogil=True, cache=True)
def copy_spans(addresses: Indices, numbers: Indices, starts: Indices, lengths: Indices, out: Bytes) -> None:
    """Concatenate spans: ``lengths[i]`` bytes from ``starts[i]`` on of the array at ``addresses[numbers[i]]``."""
    target = address(out)
    for i in range(len(numbers)):
        copy(target, addresses[numbers[i]] + starts[i], lengths[i])
        target += lengths[i]


@njit(types.void(types.float64[::1], INTS, INTS, INT, INT, INTS_2D), nogil=True, cache=True)
def place_drawn(
    drawn: npt.NDArray[np.float64], counts: Indices, firsts: Indices, n_slots: int, n_envs: int, out: Indices
) -> None:
    """The compiled form of :func:`.places_of`."""
    total, number, before = counts.sum(), 0, 0
    for i in range(len(drawn)):
        place = min(np.int64(drawn[i] * total), total - 1)
        while place - before >= counts[number]:
            before += counts[number]
            number += 1
        slot = (place - before) // n_envs
        out[0, i], out[1, i], out[2, i] = number, (firsts[number] + slot) % n_slots, place - before - slot * n_envs


def compile_all() -> None:
    """Nothing to do: functions with declared types are compiled when they are defined."""
