"""The compiled form of :mod:`.gathering`. Import through :func:`sb3_extra_buffers.compiled.load_kernels` only.

Three record formats are known: raw records, those of ``delta``, and those of libzstd. How a record is decoded stands
beside its codec, in :mod:`sb3_extra_buffers.codecs.delta_kernels` and :mod:`sb3_extra_buffers.codecs.zstd_kernels`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, cfunc, njit, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.codecs.delta_kernels import first_step, follow, frame_header
from sb3_extra_buffers.codecs.zstd_kernels import call, decompress_record

Words = npt.NDArray[np.uint32]

# Types are declared, not inferred: the threads see bare addresses, behind which must be exactly these.
_INT, _INTS, _INTS_2D = types.int64, types.int64[::1], types.int64[:, ::1]
_WORDS_2D, _FRAMES = types.uint32[:, ::1], types.uint8[:, :, ::1]
_STORED = types.Array(types.uint8, 1, "C", readonly=True)

_ROWS_AT_ONCE = 8
_TASK = np.dtype(
    [(name, np.int64) for name in ("next_row", "n_threads", "is_corrupt")]  # changed by the threads
    + [(name, np.int64) for name in ("n", "n_batches", "stack", "frame_bytes", "n_lanes", "ring_size", "data_bytes")]
    + [(name, np.int64) for name in ("capacity", "n_references", "n_words", "n_dictionaries", "n_contexts", "group")]
    + [(name, np.int64) for name in ("n_distances", "distances")]
    + [(name, np.int64) for name in ("lanes", "firsts", "outs_0", "outs_1", "ring", "encoded", "data", "starts")]
    + [(name, np.int64) for name in ("lengths", "references", "table", "decompress", "dictionaries", "contexts")]
)
"""What threads need to know about a batch: sizes, and addresses of arrays."""
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
"""``pointer(address)``, for ``numba.carray``."""
fetch_and_add: Any = intrinsic(_fetch_and_add)
"""``fetch_and_add(address, amount)``: atomically add to an integer in memory, and return its old value."""


@njit(nogil=True, cache=True)
def _walk(
    lane: int,
    begin: int,
    stop: int,
    row: int,
    firsts: Indices,
    outs_0: Bytes,
    outs_1: Bytes,
    ring: Bytes,
    encoded: Indices,
    data: Bytes,
    starts: Indices,
    lengths: Words,
    references: Words,
    group: int,
    table: Words,
    distances: Indices,
    frame: Words,
    decompress: int,
    context: int,
    dictionaries: Indices,
    whole_record: Bytes,
) -> bool:
    """Visit the frames ``begin`` to ``stop - 1`` of a lane in order and copy each to wherever it is wanted."""
    stack, frame_bytes = outs_0.shape[1], outs_0.shape[2]
    n_words = table.shape[1]
    record_bytes = group * frame_bytes
    frame_as_bytes = frame.view(np.uint8)
    frame_at, table_at, data_at = np.intp(frame.ctypes.data), np.intp(table.ctypes.data), np.intp(data.ctypes.data)
    data_end = data_at + data.shape[0]
    record = np.int64(-1)
    # A raw or decompressed record has its frames side by side. A delta record is a chain: one frame at a time.
    side_by_side, frames_at = data, np.int64(0)
    is_chain = False
    start, steps_at, next_in_record = np.int64(0), np.int64(0), np.int64(0)
    reference = np.int64(0)
    for number in range(begin, stop):
        if number >= encoded[lane]:
            source = ring[lane, number % ring.shape[1]]
        else:
            if number // group != record:
                record = number // group
                slot = record % starts.shape[1]
                start = starts[lane, slot]
                length = np.int64(lengths[lane, slot])
                reference = np.int64(references[lane, slot])
                if start < 0 or start + length > data.shape[0]:
                    return False
                is_chain = length != record_bytes and decompress == 0
                if is_chain:
                    next_in_record = 0
                    steps_at = first_step(data, start, length, group, frame_bytes)
                    if steps_at < 0 or reference >= table.shape[0]:
                        return False
                    for at in range(n_words):
                        frame[at] = table[reference, at]
                elif length == record_bytes:
                    side_by_side, frames_at = data, start
                else:
                    if not decompress_record(
                        decompress, context, data, start, length, dictionaries, reference, whole_record
                    ):
                        return False
                    side_by_side, frames_at = whole_record, np.int64(0)
            if is_chain:
                while next_in_record <= number % group:
                    header = frame_header(data, start, next_in_record, frame_bytes)
                    reference_at = table_at + 4 * n_words * reference
                    if not follow(frame_at, reference_at, frame_bytes, header, data_at + steps_at, data_end, distances):
                        return False
                    steps_at += header >> 2
                    next_in_record += 1
                source = frame_as_bytes[:frame_bytes]
            else:
                at = frames_at + (number % group) * frame_bytes
                source = side_by_side[at : at + frame_bytes]
        place = number - firsts[0, row]
        if 0 <= place < stack:
            target = outs_0[row, place]
            for byte in range(frame_bytes):
                target[byte] = source[byte]
        if firsts.shape[0] > 1:
            place = number - firsts[1, row]
            if 0 <= place < stack:
                target = outs_1[row, place]
                for byte in range(frame_bytes):
                    target[byte] = source[byte]
    return True


@cfunc(types.void(types.intp), cache=True)
def _take_part(task_address: int) -> None:
    """One thread's part of :func:`gather`: rows, a few at a time, until none are left."""
    task = carray(pointer(task_address), 1, _TASK)[0]
    n, stack, frame_bytes, n_lanes = task.n, task.stack, task.frame_bytes, task.n_lanes
    group, decompress = task.group, task.decompress
    lanes = carray(pointer(task.lanes), n, np.int64)
    firsts = carray(pointer(task.firsts), (task.n_batches, n), np.int64)
    outs_0 = carray(pointer(task.outs_0), (n, stack, frame_bytes), np.uint8)
    outs_1 = carray(pointer(task.outs_1), (n, stack, frame_bytes), np.uint8)
    ring = carray(pointer(task.ring), (n_lanes, task.ring_size, frame_bytes), np.uint8)
    encoded = carray(pointer(task.encoded), n_lanes, np.int64)
    data = carray(pointer(task.data), task.data_bytes, np.uint8)
    starts = carray(pointer(task.starts), (n_lanes, task.capacity), np.int64)
    lengths = carray(pointer(task.lengths), (n_lanes, task.capacity), np.uint32)
    references = carray(pointer(task.references), (n_lanes, task.capacity), np.uint32)
    table = carray(pointer(task.table), (task.n_references, task.n_words), np.uint32)
    distances = carray(pointer(task.distances), task.n_distances, np.int64)
    dictionaries = carray(pointer(task.dictionaries), task.n_dictionaries, np.int64)
    contexts = carray(pointer(task.contexts), task.n_contexts, np.int64)
    me = fetch_and_add(task_address + _N_THREADS, 1)
    context = contexts[me] if me < len(contexts) else 0
    frame = np.empty(task.n_words, dtype=np.uint32)
    whole_record = np.empty(group * frame_bytes if decompress else 0, dtype=np.uint8)
    while True:
        low = fetch_and_add(task_address + _NEXT_ROW, _ROWS_AT_ONCE)
        if low >= n:
            return
        for row in range(low, min(low + _ROWS_AT_ONCE, n)):
            joined = task.n_batches > 1 and 0 <= firsts[1, row] - firsts[0, row] <= stack
            done = True
            for i in range(1 if joined else task.n_batches):
                stop = firsts[1 if joined else i, row] + stack
                done = done and _walk(
                    lanes[row], firsts[i, row], stop, row, firsts, outs_0, outs_1, ring, encoded, data, starts, lengths,
                    references, group, table, distances, frame, decompress, context, dictionaries, whole_record,
                )  # fmt: skip
            if not done:
                task.is_corrupt = 1
                return


TAKE_PART = _take_part.address


@njit(
    types.boolean(
        _INTS, _INTS_2D, _FRAMES, _FRAMES, _FRAMES, _INTS, _STORED, _INTS_2D, _WORDS_2D, _WORDS_2D, _INT, _WORDS_2D,
        _INTS, _INT, _INTS, _INTS, _INT, _INT, _INT,
    ),
    nogil=True,
    cache=True,
)  # fmt: skip
def gather(
    lanes: Indices,
    firsts: Indices,
    outs_0: Bytes,
    outs_1: Bytes,
    ring: Bytes,
    encoded: Indices,
    data: Bytes,
    starts: Indices,
    lengths: Words,
    references: Words,
    group: int,
    table: Words,
    distances: Indices,
    decompress: int,
    dictionaries: Indices,
    contexts: Indices,
    take_part: int,
    parallel: int,
    n_threads: int,
) -> bool:
    """See :func:`.gathering.gather_frames`; false if bytes are corrupt.

    With two rows in ``firsts``, ``outs_1`` is filled as well. Where the two runs of frames overlap, frames are decoded
    once.

    :param table: The reference frames of ``delta`` records.
    :param distances: Those of :class:`.DeltaCodec`.
    :param decompress: The address of ``ZSTD_decompress_usingDDict`` if records are of libzstd, otherwise 0.
    :param dictionaries: Addresses of libzstd's dictionaries, by reference.
    :param contexts: Addresses of libzstd's decompression contexts, one for each thread.
    :param take_part: The address of :func:`_take_part`, which is not known when this is compiled.
    :param parallel: The address of a function that runs another one in several threads, or 0.
    """
    tasks = np.zeros(1, dtype=_TASK)
    task = tasks[0]
    task.n, task.n_batches, task.stack, task.frame_bytes = len(lanes), len(firsts), outs_0.shape[1], outs_0.shape[2]
    task.n_lanes, task.ring_size, task.data_bytes, task.capacity = len(ring), ring.shape[1], len(data), starts.shape[1]
    task.n_references, task.n_words, task.group = table.shape[0], table.shape[1], group
    task.n_distances, task.distances = len(distances), distances.ctypes.data
    task.n_dictionaries, task.n_contexts, task.decompress = len(dictionaries), len(contexts), decompress
    task.lanes, task.firsts = lanes.ctypes.data, firsts.ctypes.data
    task.outs_0, task.outs_1 = outs_0.ctypes.data, outs_1.ctypes.data
    task.ring, task.encoded, task.data = ring.ctypes.data, encoded.ctypes.data, data.ctypes.data
    task.starts, task.lengths, task.references = starts.ctypes.data, lengths.ctypes.data, references.ctypes.data
    task.table, task.dictionaries, task.contexts = table.ctypes.data, dictionaries.ctypes.data, contexts.ctypes.data
    address = np.intp(tasks.ctypes.data)
    if parallel and n_threads > 1:
        call(parallel, (take_part, address, n_threads, 0))
    else:
        call(take_part, (address,))
    return bool(tasks[0].is_corrupt == 0)  # not "task", which would not keep its memory alive until here


def compile_all() -> None:
    """Nothing to do: functions with declared types are compiled when they are defined."""
