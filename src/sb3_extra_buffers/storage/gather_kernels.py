"""The kernels of :mod:`.compiled_gathering`. Import through :func:`sb3_extra_buffers.compiled.load_kernels` only.

The kernels decode six record formats: raw records, those of ``delta``, ``bitpack``, ``pixel-lz`` and libzstd, and those
of ``delta`` that libzstd has compressed. The decoder of each format is next to its codec, in the kernels of
:mod:`sb3_extra_buffers.codecs`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, from_dtype, njit, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

from sb3_extra_buffers.codecs.base import Bytes, Indices, Words
from sb3_extra_buffers.codecs.delta_kernels import follow, frame_header, is_consistent, restart_before
from sb3_extra_buffers.codecs.memory_kernels import (
    FRAMES,
    INT,
    INTS,
    INTS_2D,
    STORED,
    WORDS_2D,
    address,
    call,
    copy,
    load32,
    load_int,
)
from sb3_extra_buffers.codecs.packed_frames_kernels import SCRATCH_BYTES, unpack_frame
from sb3_extra_buffers.codecs.zstd_kernels import decompress_record

_ROWS_AT_ONCE = 2
_NO_END = np.int64(1 << 62)
SOURCE = np.dtype(
    [(name, np.int64) for name in ("ring_size", "data_bytes", "capacity", "n_references", "n_words", "n_dictionaries")]
    + [(name, np.int64) for name in ("group", "distances", "ring", "encoded", "data", "starts", "lengths")]
    + [(name, np.int64) for name in ("references", "table", "predictors", "planes", "decompress", "dictionaries")]
    + [(name, np.int64) for name in ("base", "ends_0", "ends_1", "n_earlier")]
)
"""A frame store, as threads see it: sizes, and addresses of arrays."""
_SOURCES = from_dtype(SOURCE)[::1]
_TASK = np.dtype(
    [(name, np.int64) for name in ("next_row", "n_threads", "n_in_time", "is_corrupt")]  # changed by the threads
    + [(name, np.int64) for name in ("n", "n_batches", "stack", "frame_bytes", "scratch_bytes", "n_contexts")]
    + [(name, np.int64) for name in ("n_sources", "sources", "numbers", "lanes", "firsts", "outs_0", "outs_1")]
    + [(name, np.int64) for name in ("contexts",)]
)
"""A batch, as threads see it."""
_NEXT_ROW, _N_THREADS = _TASK.fields["next_row"][1], _TASK.fields["n_threads"][1]  # type: ignore[index]


def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), generate


def _fetch_and_add(typing_context: Any, address: Any, amount: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "monotonic")

    return types.intp(types.intp, types.intp), generate


pointer: Any = intrinsic(_pointer)
"""``pointer(address)``: turn an integer into a pointer, as ``numba.carray`` needs it."""
fetch_and_add: Any = intrinsic(_fetch_and_add)
"""``fetch_and_add(address, amount)``: atomically add to an integer in memory, and return its old value."""


@njit(nogil=True, cache=True)
def _gather_run(task: Any, store: Any, row: int, begin: int, stop: int, context: int, scratch: int) -> bool:
    """Write the frames ``begin`` to ``stop - 1`` of a row's lane to the batches that need them; false if corrupt.

    :param context: The address of libzstd's decompression context for this thread.
    :param scratch: The address of working memory: for the frame to which ``delta`` applies its steps, followed by a
        decompressed record.
    """
    size, group, record_bytes = task.frame_bytes, store.group, store.group * task.frame_bytes
    is_packed = store.predictors != 0 or store.planes != 0
    lane = load_int(task.lanes + 8 * row)
    encoded, data_end = load_int(store.encoded + 8 * lane), store.data + store.data_bytes
    decompressed = scratch + 4 * store.n_words
    record, length, start, reference = -1, 0, 0, 0
    steps, following = 0, 0  # of ``delta``: where the steps of the next frame begin, and its number
    for number in range(begin, stop):
        inside = number % group
        if number >= encoded:
            source = store.ring + size * (lane * store.ring_size + number % store.ring_size)
        else:
            if number // group != record:
                record = number // group
                entry = lane * store.capacity + record % store.capacity
                offset, length = load_int(store.starts + 8 * entry), load32(store.lengths + 4 * entry)
                reference = load32(store.references + 4 * entry)
                if offset < 0 or offset > store.data_bytes - length:
                    return False
                start = store.data + offset
                if store.decompress and length != record_bytes:
                    length = decompress_record(
                        store.decompress, context, start, length, store.dictionaries, store.n_dictionaries, reference,
                        decompressed, record_bytes,
                    )  # fmt: skip
                    start, data_end = decompressed, decompressed + record_bytes
                if length != record_bytes and not is_packed:
                    if reference >= store.n_references or not is_consistent(start, length, group, size):
                        return False
                    reference = store.table + 4 * store.n_words * reference
                    following, steps = restart_before(start, inside, group, size)
                    if following == 0:
                        copy(scratch, reference, size)
            if length == record_bytes:
                source = start + inside * size
            elif is_packed:
                source = 0  # the frame is decoded straight into the first batch that needs it
            else:
                source = scratch
                while following <= inside:
                    header = frame_header(start, following, size)
                    if not follow(scratch, reference, size, header, steps, data_end, store.distances):
                        return False
                    steps, following = steps + (header >> 2), following + 1
        for i in range(task.n_batches):
            place = number - load_int(task.firsts + 8 * (i * task.n + row))
            if 0 <= place < task.stack:
                target = (task.outs_1 if i else task.outs_0) + size * (row * task.stack + place)
                if source:
                    copy(target, source, size)
                else:
                    if not unpack_frame(
                        target, size, start, length, inside, group, store.predictors, store.planes, scratch,
                    ):  # fmt: skip
                        return False
                    source = target
    return True


@cfunc(types.void(types.intp), cache=True)
def _take_part(task_address: int) -> None:
    """Do one thread's part of :func:`gather_from`: take a few rows at a time until none are left."""
    task = carray(pointer(task_address), 1, _TASK)[0]
    me = fetch_and_add(task_address + _N_THREADS, 1)
    context = load_int(task.contexts + 8 * me) if me < task.n_contexts else 0
    stores = carray(pointer(task.sources), (task.n_sources,), SOURCE)
    scratch = np.empty(task.scratch_bytes, dtype=np.uint8)
    while True:
        low = fetch_and_add(task_address + _NEXT_ROW, _ROWS_AT_ONCE)
        if low >= task.n:
            if low < task.n + _ROWS_AT_ONCE:  # exactly one thread gets such a number
                task.n_in_time = load_int(task_address + _N_THREADS)
            return
        for row in range(low, min(low + _ROWS_AT_ONCE, task.n)):
            done = True
            store = stores[load_int(task.numbers + 8 * row) if task.numbers else 0]
            begin = load_int(task.firsts + 8 * row)
            if begin < 0:  # a row that the caller fills
                continue
            stop = begin + task.stack
            if task.n_batches == 2:
                other = load_int(task.firsts + 8 * (task.n + row))
                if begin <= other <= stop:
                    stop = other + task.stack
                else:
                    done = _gather_run(task, store, row, other, other + task.stack, context, address(scratch))
            if not done or not _gather_run(task, store, row, begin, stop, context, address(scratch)):
                task.is_corrupt = 1
                return


TAKE_PART = _take_part.address


# Types are declared, not inferred: threads read the arrays by address, so each must have exactly this type.
@njit(
    types.void(
        _SOURCES, INT, FRAMES, INTS, STORED, INTS_2D, WORDS_2D, WORDS_2D, INT, WORDS_2D, INTS, INTS_2D, INT,
        INT, INTS,
    ),
    nogil=True,
    cache=True,
)  # fmt: skip
def describe(
    sources: Any,
    number: int,
    ring: Bytes,
    encoded: Indices,
    data: Bytes,
    starts: Indices,
    lengths: Words,
    references: Words,
    group: int,
    table: Words,
    distances: Indices,
    predictors: Indices,
    planes: int,
    decompress: int,
    dictionaries: Indices,
) -> None:
    """Describe a frame store in row ``number`` of a table. Its arrays must exist as long as the table is used.

    :param table: The reference frames of ``delta`` records; empty for other records.
    :param distances: Those of :class:`.DeltaCodec`.
    :param predictors: Those of :class:`.BitpackCodec`; empty for other records.
    :param planes: Those of :class:`.PixelLzCodec`; 0 for other records.
    :param decompress: The address of ``ZSTD_decompress_usingDDict`` if libzstd decompresses the records, otherwise 0.
    :param dictionaries: Addresses of libzstd's dictionaries, by reference.
    """
    store = sources[number]
    store.ring_size, store.data_bytes, store.capacity = ring.shape[1], len(data), starts.shape[1]
    store.n_references, store.n_words, store.group = table.shape[0], table.shape[1], group
    store.n_dictionaries, store.decompress, store.distances = len(dictionaries), decompress, distances.ctypes.data
    store.ring, store.encoded, store.data = ring.ctypes.data, encoded.ctypes.data, data.ctypes.data
    store.starts, store.lengths, store.references = starts.ctypes.data, lengths.ctypes.data, references.ctypes.data
    store.table, store.dictionaries = table.ctypes.data, dictionaries.ctypes.data
    store.predictors, store.planes = predictors.ctypes.data if len(predictors) else 0, planes


@njit(INT(_SOURCES, INTS, INTS, INTS_2D, FRAMES, FRAMES, INTS, INT, INT, INT), nogil=True, cache=True)
def gather_from(
    sources: Any,
    numbers: Indices,
    lanes: Indices,
    firsts: Indices,
    outs_0: Bytes,
    outs_1: Bytes,
    contexts: Indices,
    take_part: int,
    parallel: int,
    n_threads: int,
) -> int:
    """Fill batches with runs of consecutive frames; see :func:`.gathering.gather_frames`.

    Returns how many threads had started when no rows were left; 0 if bytes are corrupt.

    With two rows in ``firsts``, ``outs_1`` is filled as well. If the two runs of frames overlap, frames in both are
    decoded once.

    :param sources: Frame stores; see :func:`describe`.
    :param numbers: For each row of the batch, its frame store in ``sources``; empty if there is only one.
    :param contexts: Addresses of libzstd's decompression contexts, one for each thread.
    :param take_part: The address of :func:`_take_part`, which is not known when this is compiled.
    :param parallel: The address of OpenMP's function that runs another one in several threads, or 0 for one thread.
    """
    tasks = np.zeros(1, dtype=_TASK)
    task = tasks[0]
    task.n, task.n_batches, task.stack, task.frame_bytes = len(lanes), len(firsts), outs_0.shape[1], outs_0.shape[2]
    for store in sources:
        most = 4 * store.n_words + store.group * task.frame_bytes + SCRATCH_BYTES
        task.scratch_bytes = max(task.scratch_bytes, most)
    task.n_sources, task.sources = len(sources), sources.ctypes.data
    task.numbers = numbers.ctypes.data if len(numbers) else 0
    task.lanes, task.firsts = lanes.ctypes.data, firsts.ctypes.data
    task.outs_0, task.outs_1 = outs_0.ctypes.data, outs_1.ctypes.data
    task.n_contexts, task.contexts = len(contexts), contexts.ctypes.data
    task_address = np.intp(tasks.ctypes.data)
    if parallel and n_threads > 1:
        call(parallel, (take_part, task_address, n_threads, 0))
    else:
        call(take_part, (task_address,))
    # Not "task", which would not keep the array alive until here.
    return np.int64(0 if tasks[0].is_corrupt else tasks[0].n_in_time)


@njit(types.void(_SOURCES, INT, INTS, WORDS_2D, WORDS_2D, INT), nogil=True, cache=True)
def describe_index(sources: Any, number: int, base: Indices, ends_0: Words, ends_1: Words, n_earlier: int) -> None:
    """Add to a source where its observations are found, for :func:`gather_observations`.

    :param base: The lowest frame number of each lane in this source.
    :param ends_0: For each slot and environment, the frame after the last one of the observation in column 0.
    :param n_earlier: How many of the following sources have earlier frames of the same lanes, from replaced codecs.
    """
    source = sources[number]
    source.base, source.ends_0, source.ends_1 = base.ctypes.data, ends_0.ctypes.data, ends_1.ctypes.data
    source.n_earlier = n_earlier


@njit(
    types.int64(
        _SOURCES, INTS, INT, INT, INTS, INT, INTS, INT, INTS, FRAMES, FRAMES, INTS, INTS, INT, INT, INT,
    ),
    nogil=True,
    cache=True,
)  # fmt: skip
def gather_observations(
    sources: Any,
    numbers: Indices,
    n_slots: int,
    n_envs: int,
    envs: Indices,
    column_0: int,
    slots_0: Indices,
    column_1: int,
    slots_1: Indices,
    outs_0: Bytes,
    outs_1: Bytes,
    left: Indices,
    contexts: Indices,
    take_part: int,
    parallel: int,
    n_threads: int,
) -> int:
    """:func:`gather_from` for observations that are given by column, slot and environment.

    :param numbers: For each row of the batch, the first source of its store, which is the one in use; empty if that is
        source 0 for all rows.
    :param column_1: Negative if there is only one column.
    :param left: Receives the number of rows that are left to the caller, and then these rows: those with an observation
        that was never written or is in no source, and those whose two observations are in different sources.
    """
    n, n_left, stack = len(envs), 0, outs_0.shape[1]
    n_columns = 1 if column_1 < 0 else 2
    firsts = np.empty((n_columns, n), dtype=np.int64)
    homes = np.empty(n if len(sources) > 1 else 0, dtype=np.int64)
    for row in range(n):
        home, env, is_here = numbers[row] if len(numbers) else 0, envs[row], False
        source, lowest, highest = sources[home], _NO_END, np.int64(-1)
        for i in range(n_columns):
            slot, column = (slots_1[row], column_1) if i else (slots_0[row], column_0)
            first = np.int64(-1)
            if 0 <= slot < n_slots and 0 <= env < n_envs:
                ends = source.ends_1 if column else source.ends_0
                first = np.int64(load32(ends + 4 * (slot * n_envs + env))) - stack
            firsts[i, row] = first
            lowest, highest = min(lowest, first), max(highest, first)
        if lowest >= 0:
            base, end, n_earlier = load_int(source.base + 8 * env), _NO_END, source.n_earlier
            while lowest < base and n_earlier > 0:
                end, home, n_earlier = base, home + 1, n_earlier - 1
                base = load_int(sources[home].base + 8 * env)
            is_here = base <= lowest and highest < end
        if not is_here:
            n_left += 1
            left[n_left] = row
            firsts[0, row] = -1
        if len(homes):
            homes[row] = home
    left[0] = n_left
    return gather_from(sources, homes, envs, firsts, outs_0, outs_1, contexts, take_part, parallel, n_threads)


def compile_all() -> None:
    """Nothing to do: functions with declared types are compiled when they are defined."""
