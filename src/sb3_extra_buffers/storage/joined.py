"""Reading the arrays and stores of several buffers as if they were one buffer.

The buffers have the same spaces, the same number of environments and the same number of slots. A place in them is given
by the *number* of the buffer, a slot and an environment. One call of a compiled kernel reads from all of them, so many
small buffers are as fast as a large one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from operator import attrgetter, is_not
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.storage.base_store import BaseStore
from sb3_extra_buffers.storage.compiled_gathering import Sources, Wanted, fill_rows
from sb3_extra_buffers.storage.observation_store import ObservationStore
from sb3_extra_buffers.storage.outputs import ALIGNMENT
from sb3_extra_buffers.storage.plain_store import PlainStore

_KERNELS = "sb3_extra_buffers.storage.joined_kernels"
_ROWS, _NEXT_ROWS, _NEWEST, _TURN = map(attrgetter, ("_rows", "_next_rows", "_newest", "_turn"))


def places_of(drawn: npt.NDArray[np.float64], counts: Indices, firsts: Indices, n_slots: int, n_envs: int) -> Indices:
    """Turn sorted random numbers in [0, 1) into places: numbers of buffers, slots and environments, ``(3, n)``.

    :param counts: How many transitions each buffer has.
    :param firsts: The slot of each buffer's oldest transition.
    """
    kernels = load_kernels(_KERNELS)
    places: Indices = np.empty((3, len(drawn)), dtype=np.int64)
    if kernels is not None:
        kernels.place_drawn(drawn, counts, firsts, n_slots, n_envs, places)
        return places
    ends = counts.cumsum()
    whole = np.minimum((drawn * ends[-1]).astype(np.int64), ends[-1] - 1)
    places[0] = np.searchsorted(ends, whole, side="right")
    places[1], places[2] = np.divmod(whole - (ends - counts)[places[0]], n_envs)
    places[1] = (places[1] + firsts[places[0]]) % n_slots
    return places


class JoinedArrays:
    """Some *fields* of several buffers. A field is one array per buffer, which may be replaced between calls.

    :param widths: How many elements a row of each field has.
    """

    def __init__(self, *widths: int) -> None:
        self._widths, self._n = widths, -1
        self._arrays: list[npt.NDArray[Any]] = []

    def take(self, arrays: list[npt.NDArray[Any]], numbers: Indices, places: Indices) -> list[npt.NDArray[Any]]:
        """Return for each field an ``(n, width)`` array: row ``i`` is row ``places[i]`` of buffer ``numbers[i]``.

        :param arrays: The arrays of all buffers for the first field, then those for the next one.
        """
        n = len(places)
        if n != self._n or len(arrays) != len(self._arrays) or any(map(is_not, arrays, self._arrays)):
            self._describe(arrays, n)
        memory = np.empty(self._n_bytes, dtype=np.uint8)
        outs: list[npt.NDArray[Any]] = [np.ndarray(shape, dtype, memory, at) for shape, dtype, at in self._outs]
        kernels = load_kernels(_KERNELS)
        if kernels is not None:
            kernels.take_rows(self._addresses, self._sizes, numbers, places, memory, ALIGNMENT)
            return outs
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            for out, field in zip(outs, range(0, len(arrays), len(arrays) // len(outs)), strict=True):
                out[mine] = arrays[field + number].reshape(-1, out.shape[1])[places[mine]]
        return outs

    def _describe(self, arrays: list[npt.NDArray[Any]], n: int) -> None:
        """Look up the addresses of the arrays, and lay out the memory for ``n`` rows of each field."""
        self._n = -1  # until all of this is right: after Ctrl-C, the next call starts again
        self._outs, self._n_bytes = [], 0
        addresses = np.array([array.ctypes.data for array in arrays], dtype=np.int64)
        self._addresses = addresses.reshape(len(self._widths), -1)
        dtypes = [array.dtype for array in arrays[:: self._addresses.shape[1]]]
        sizes = [width * dtype.itemsize for width, dtype in zip(self._widths, dtypes, strict=True)]
        self._sizes = np.array(sizes)
        for width, dtype, size in zip(self._widths, dtypes, sizes, strict=True):
            self._outs.append(((n, width), dtype, self._n_bytes))
            self._n_bytes += -(-n * size // ALIGNMENT) * ALIGNMENT
        self._arrays, self._n = arrays, n


class JoinedStores:
    """One store of each buffer, all for observations of the same shape and dtype."""

    def __init__(self, stores: Sequence[BaseStore]) -> None:
        self.stores = stores
        self._columns = [JoinedArrays(1) for _ in range(stores[0].n_columns)]
        self._sources = Sources() if isinstance(stores[0], ObservationStore) else None
        self._plain_arrays: list[npt.NDArray[Any]] = []
        self._newest: list[Any] = []

    def fill(self, numbers: Indices, wanted: Wanted, envs: Indices, outs: list[npt.NDArray[Any]]) -> None:
        """Write observations into ``outs``; see :meth:`.BaseStore.fill`. ``numbers`` must be sorted."""
        first = self.stores[0]
        if first.digests is None and isinstance(first, PlainStore):
            self._fill_plain(self.stores, numbers, wanted, envs, outs)  # type: ignore[arg-type]  # they are all alike
            return
        sources = self._sources if first.digests is None else None
        left = sources.fill(self.stores, numbers, wanted, envs, outs) if sources is not None else None  # type: ignore[arg-type]
        if left is None:
            self._fill_one_by_one(numbers, wanted, envs, outs)
        elif len(left):
            fill_rows(left, wanted, envs, outs, partial(self._fill_one_by_one, numbers[left]))

    def _fill_one_by_one(self, numbers: Indices, wanted: Wanted, envs: Indices, outs: list[npt.NDArray[Any]]) -> None:
        bounds = np.searchsorted(numbers, np.arange(len(self.stores) + 1)).tolist()
        for store, low, high in zip(self.stores, bounds[:-1], bounds[1:], strict=True):
            if low < high:
                rows = slice(low, high)
                mine = [(column, slots[rows]) for column, slots in wanted]
                store.fill(mine, envs[rows], [out[rows] for out in outs])

    def _fill_plain(
        self,
        stores: Sequence[PlainStore],
        numbers: Indices,
        wanted: Wanted,
        envs: Indices,
        outs: list[npt.NDArray[Any]],
    ) -> None:
        first, kernels = stores[0], load_kernels(_KERNELS)
        if kernels is None:
            self._fill_one_by_one(numbers, wanted, envs, outs)
            return
        arrays = [*map(_ROWS, stores), *map(_NEXT_ROWS, stores)]
        if len(arrays) != len(self._plain_arrays) or any(map(is_not, arrays, self._plain_arrays)):
            addresses = np.array([array.ctypes.data for array in arrays], dtype=np.int64)
            self._plain_addresses, self._plain_arrays = addresses.reshape(2, -1), arrays
        n_envs, newest = first.n_envs, [*map(_NEWEST, stores), *map(_TURN, stores)]
        if newest != self._newest:
            slots_and_rows = [
                [-1 if store._newest is None else store._newest for store in stores],
                [first._blocks_start + store._turn * n_envs for store in stores],
            ]
            self._newest_table, self._newest = np.array(slots_and_rows, dtype=np.int64), newest
        (_, slots), (next_column, next_slots) = wanted
        width = math.prod(first.shape)
        rows, next_rows = (out.reshape(len(out), width).view(np.uint8) for out in outs)
        kernels.take_observations(
            self._plain_addresses, self._newest_table, n_envs, numbers, envs, slots, next_column == 1, next_slots,
            rows, next_rows,
        )  # fmt: skip

    def firsts(self, numbers: Indices, wanted: Wanted, envs: Indices) -> Indices:
        """The first frame of each observation, ``(columns, n)``; negative where there is no observation."""
        stores: Sequence[Any] = self.stores
        firsts = np.empty((len(wanted), len(envs)), dtype=np.int64)
        for row, (column, slots) in zip(firsts, wanted, strict=True):
            ends = [store.ends[column] for store in stores]
            row[:] = self._columns[column].take(ends, numbers, slots * stores[0].n_envs + envs)[0][:, 0]
        firsts -= stores[0].layout.stack
        return firsts
