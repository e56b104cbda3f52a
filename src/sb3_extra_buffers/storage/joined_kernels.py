"""The compiled form of :mod:`.joined`. Import through :func:`sb3_extra_buffers.compiled.load_kernels` only."""

from __future__ import annotations

from numba import njit, types

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.codecs.memory_kernels import address, copy

_INTS = types.int64[::1]


@njit(types.void(_INTS, _INTS, _INTS, types.uint8[:, ::1]), nogil=True, cache=True)
def take_rows(addresses: Indices, numbers: Indices, places: Indices, out: Bytes) -> None:
    """Copy row ``places[i]`` of the array at ``addresses[numbers[i]]``, for each ``i``."""
    size, target = out.shape[1], address(out)
    for i in range(len(numbers)):
        copy(target + i * size, addresses[numbers[i]] + places[i] * size, size)


@njit(types.void(_INTS, _INTS, _INTS, _INTS, types.uint8[::1]), nogil=True, cache=True)
def copy_spans(addresses: Indices, numbers: Indices, starts: Indices, lengths: Indices, out: Bytes) -> None:
    """Copy ``lengths[i]`` bytes from ``starts[i]`` on of the array at ``addresses[numbers[i]]``, in a row."""
    target = address(out)
    for i in range(len(numbers)):
        copy(target, addresses[numbers[i]] + starts[i], lengths[i])
        target += lengths[i]


def compile_all() -> None:
    """Nothing to do: functions with declared types are compiled when they are defined."""
