"""Reading batches with a compiled kernel, which decodes no more of a record than it needs.

The kernel can decode the records of most codecs; see :attr:`.Codec.record_format`. Small batches spend most of their
time in Python. So the kernel looks up the frames of observations itself, and takes the addresses of arrays from a
table. The table is only written again when an array has been replaced.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from itertools import takewhile
from operator import attrgetter, is_not
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs import libzstd
from sb3_extra_buffers.codecs.base import Bytes, Codec, Indices, Words
from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.parallel import ALONE, Team, learn_from, run_in_slices, team_for
from sb3_extra_buffers.storage.arena import Arena
from sb3_extra_buffers.storage.record_index import RecordIndex
from sb3_extra_buffers.storage.stacking import StackLayout

Wanted = list[tuple[int, Indices]]
"""Columns, and the slots to read from each."""
_KERNELS = "sb3_extra_buffers.storage.gather_kernels"
_INT64 = np.dtype(np.int64)
_ALL_ROWS = slice(None)
_NO_CONTEXTS: Indices = np.zeros(0, dtype=np.int64)
NO_NUMBERS: Indices = np.zeros(0, dtype=np.int64)
_ARRAYS = attrgetter("base", "ring", "encoded", "index", "codec", "codec.dictionary_addresses")
"""The attributes of a frame store that its row of the table depends on..."""
_GROWING_ARRAYS = attrgetter("arena.data", "codec.reference_frames")
"""... and those whose memory can only grow in place while nothing else refers to them. So only weak references to these
arrays are kept."""


class GatheredFrames(Protocol):
    """The part of a :class:`.FrameStore` that gathering reads. The attributes are described there."""

    codec: Codec
    layout: StackLayout
    arena: Arena
    ring: Bytes
    base: Indices
    encoded: Indices
    index: RecordIndex

    def gather(self, lanes: Indices, firsts: Indices, outs: list[Bytes]) -> None: ...


class ObservationsByFrame(Protocol):
    """The part of an :class:`.ObservationStore` that gathering reads."""

    n_slots: int
    n_envs: int
    layout: StackLayout
    ends: list[Words]

    @property
    def frame_stores(self) -> Sequence[GatheredFrames]:
        """The frame store in use, then those of replaced codecs, the newest first."""
        ...


class Sources:
    """A table that describes stores of like observations to the kernel, so that one call reads from all of them.

    Each row of the table, a *source*, describes one frame store: the one in use, or that of a replaced codec.
    """

    def __init__(self) -> None:
        self._layout: StackLayout | None = None
        """The layout of all stores in the table."""
        self._n_sources: list[int] = []
        """The number of sources of each store."""
        self._newest: Indices = NO_NUMBERS
        """For each store, its first source, which is the one in use; empty if every store has one source."""
        self._described: list[tuple[Any, ...]] = []
        """For each source, the objects that it was described from; an empty tuple if it has to be described again."""
        self._growing: list[tuple[Any, ...]] = []
        """For each source, weak references to the arrays that can grow in place."""
        self._kernels: Any = None
        self._table: Any = None
        self._decompresses = False

    def fill(
        self,
        stores: Sequence[ObservationsByFrame],
        numbers: Indices,
        wanted: Wanted,
        envs: Indices,
        outs: list[npt.NDArray[Any]],
    ) -> Indices | None:
        """Write observations into ``outs``, and return the rows that are left to the caller.

        The caller has to fill rows with an observation that was never written, rows whose two observations are stored
        by different codecs, and rows of a replaced codec without a kernel, or of a codec replaced before that one.
        Returns ``None`` if the kernel cannot read from these stores at all.

        :param numbers: For each row, the number of its store, in ascending order; empty if there is only one store.
        """
        store = stores[0]
        (column_0, slots_0), (column_1, slots_1) = wanted[0], wanted[1] if len(wanted) > 1 else (-1, wanted[0][1])
        if len(wanted) > 2 or not outs[0].size:
            return None
        if not self._describe(stores):
            return None
        slots_0, slots_1, envs = _plain(slots_0), _plain(slots_1), _plain(envs)
        if len(self._newest) and len(numbers):
            numbers = self._newest.take(numbers)
        n_slots, n_envs, left = store.n_slots, store.n_envs, []
        kernels, table = self._kernels, self._table

        def gather(frames: list[Bytes]) -> None:
            arrays = numbers, envs, slots_0, slots_1, frames[0], frames[-1]

            def run(rows: slice, contexts: Indices, team: Team) -> int:
                numbers, envs, slots_0, slots_1, outs_0, outs_1 = (
                    arrays if rows is _ALL_ROWS else [array[rows] if len(array) else array for array in arrays]
                )
                unfilled: Indices = np.empty(len(envs) + 1, dtype=_INT64)
                n_in_time: int = kernels.gather_observations(
                    table, numbers, n_slots, n_envs, envs, column_0, slots_0, column_1, slots_1, outs_0, outs_1,
                    unfilled, contexts, kernels.TAKE_PART, *team,
                )  # fmt: skip
                if unfilled[0]:
                    left.append(unfilled[1 : unfilled[0] + 1] + (rows.start or 0))
                return n_in_time

            run_kernel(run, self._decompresses, frames)

        fill_frames(store.layout, outs, gather)
        return np.sort(np.concatenate(left)) if left else NO_NUMBERS  # threads append to it in any order

    def _describe(self, stores: Sequence[ObservationsByFrame]) -> bool:
        """Bring the table up to date. Returns false if a store has no kernel, or another layout than the first one."""
        sources = [store.frame_stores for store in stores]
        if stores[0].layout is not self._layout or [*map(len, sources)] != self._n_sources:
            self._begin(stores[0].layout, [*map(len, sources)])
        number = 0
        for store, frame_stores in zip(stores, sources, strict=True):
            for i, frames in enumerate(frame_stores):
                arrays, growing = (store.layout, store.ends, *_ARRAYS(frames)), _GROWING_ARRAYS(frames)
                if not self._is_described(number, arrays, growing):
                    self._described[number] = ()
                    if store.layout != self._layout or not self._describe_source(number, store, frame_stores[i:], i):
                        return False
                    self._described[number], self._growing[number] = arrays, tuple(map(weakref.ref, growing))
                number += 1
        return True

    def _begin(self, layout: StackLayout, n_sources: list[int]) -> None:
        total = sum(n_sources)
        newest = np.cumsum([0, *n_sources[:-1]], dtype=_INT64) if total > len(n_sources) else NO_NUMBERS
        described, growing = [()] * total, [()] * total
        # In one assignment: Ctrl-C must not leave some old values and some new ones.
        self._layout, self._n_sources, self._newest, self._table, self._described, self._growing = (
            layout, n_sources, newest, None, described, growing,
        )  # fmt: skip

    def _is_described(self, number: int, arrays: tuple[Any, ...], growing: tuple[Any, ...]) -> bool:
        described = self._described[number]
        if not described or any(map(is_not, arrays, described)):
            return False
        data, references = self._growing[number]
        return data() is growing[0] and references() is growing[1]

    def _describe_source(
        self, number: int, store: ObservationsByFrame, frame_stores: Sequence[GatheredFrames], age: int
    ) -> bool:
        """Write the first of ``frame_stores`` into the table. Returns false if the codec in use has no kernel.

        :param frame_stores: A frame store, and all older ones of ``store``.
        :param age: How many frame stores of ``store`` are newer.
        """
        frames, *earlier = frame_stores
        kernels, decompress = compiled_kernels(frames.codec)
        if kernels is None:
            return age > 0  # the source stays empty: the caller reads observations of this codec and of older ones
        if self._table is None:
            self._kernels, self._table = kernels, np.zeros(len(self._described), dtype=kernels.SOURCE)
        _describe(kernels, self._table, number, frames, decompress)
        known = takewhile(lambda frames: compiled_kernels(frames.codec)[0] is not None, earlier)
        kernels.describe_index(self._table, number, frames.base, store.ends[0], store.ends[-1], len([*known]))
        self._decompresses = bool(self._table["decompress"].any())
        return True


def _plain(numbers: Indices) -> Indices:
    """The same numbers in the form that kernels need: a contiguous and writable array of int64."""
    return numbers if numbers.dtype == _INT64 and numbers.flags.carray else np.array(numbers, dtype=_INT64)


def fill_rows(
    rows: Indices,
    wanted: Wanted,
    envs: Indices,
    outs: list[npt.NDArray[Any]],
    fill: Callable[[Wanted, Indices, list[npt.NDArray[Any]]], object],
) -> None:
    """Fill ``rows`` of a batch with ``fill``, a function that can only fill whole batches."""
    parts = [np.empty((len(rows), *out.shape[1:]), dtype=out.dtype) for out in outs]
    fill([(column, slots[rows]) for column, slots in wanted], envs[rows], parts)
    for part, out in zip(parts, outs, strict=True):
        out[rows] = part


def fill_frames(layout: StackLayout, outs: list[npt.NDArray[Any]], gather: Callable[[list[Bytes]], None]) -> None:
    """Fill observations frame by frame: ``gather`` is called with arrays of shape ``(n, stack, frame_bytes)``."""
    n = len(outs[0])
    if layout.is_contiguous:
        shape = n, layout.stack, layout.frame.size
        gather([out.reshape(shape).view(np.uint8) for out in outs])
        return
    frames = [np.empty((n, layout.stack, layout.frame.nbytes), dtype=np.uint8) for _ in outs]
    gather(frames)
    for source, out in zip(frames, outs, strict=True):
        layout.merge(source, out)


def gather_frames(frames: GatheredFrames, lanes: Indices, firsts: Indices, outs: list[Bytes]) -> bool:
    """Fill batches with runs of consecutive frames. Returns false if there is no kernel for that.

    See :func:`.gathering.gather_frames`.
    """
    kernels, decompress = compiled_kernels(frames.codec)
    if kernels is None or len(outs) > 2:
        return False
    table = np.zeros(1, dtype=kernels.SOURCE)
    _describe(kernels, table, 0, frames, decompress)
    lanes = _plain(lanes)

    def run(rows: slice, contexts: Indices, team: Team) -> int:
        n_in_time: int = kernels.gather_from(
            table, NO_NUMBERS, lanes[rows], np.ascontiguousarray(firsts[:, rows]), outs[0][rows], outs[-1][rows],
            contexts, kernels.TAKE_PART, *team,
        )  # fmt: skip
        return n_in_time

    run_kernel(run, bool(decompress), outs)
    return True


def _describe(kernels: Any, table: Any, number: int, frames: GatheredFrames, decompress: int) -> None:
    codec, index = frames.codec, frames.index
    kernels.describe(
        table, number, frames.ring, frames.encoded, frames.arena.data, index.starts, index.lengths, index.references,
        codec.frames_per_record, codec.reference_frames, codec.distances, codec.predictors, codec.planes, decompress,
        codec.dictionary_addresses,
    )  # fmt: skip


def compiled_kernels(codec: Codec) -> tuple[Any, int]:
    """The kernels that decode a codec's records, or ``None``; and the address of libzstd's function for them, or 0."""
    record_format = codec.record_format
    needs_libzstd = record_format in ("zstd", "delta-zstd")
    decompress = libzstd.decompress_function() if needs_libzstd else 0
    can_compile = decompress if needs_libzstd else record_format
    return load_kernels(_KERNELS) if can_compile else None, decompress


def run_kernel(run: Callable[[slice, Indices, Team], int], needs_contexts: bool, outs: list[Bytes]) -> None:
    """Fill a batch with several threads.

    :param run: ``run(rows, contexts, team)`` fills some rows. It returns how many threads started before all work was
        done; 0 if bytes are corrupt.
    :param needs_contexts: Whether each thread needs a decompression context of libzstd.
    """

    def work(rows: slice, team: Team) -> int:
        if not needs_contexts:
            return run(rows, _NO_CONTEXTS, team)
        with libzstd.contexts(team.n_threads) as contexts:
            return run(rows, contexts, team)

    n_bytes = outs[0].nbytes * len(outs)
    team = team_for(n_bytes)
    if team is None:
        n_in_time = min(run_in_slices(lambda low, high: work(slice(low, high), ALONE), len(outs[0]), n_bytes))
    else:
        began = time.perf_counter_ns()
        n_in_time = work(_ALL_ROWS, team)
        learn_from(team, n_in_time, (time.perf_counter_ns() - began) / max(n_bytes, 1))
    if not n_in_time:
        raise CorruptDataError("Stored records do not decode.")
