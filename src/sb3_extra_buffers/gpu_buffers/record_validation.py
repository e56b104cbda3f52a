"""Whether records are what their codec writes.

Kernels trust every record: they have no way to raise an error, and looking would take as long as decoding. So records
that come from a file are looked at once, here, on the host, all of them together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.base import NO_REFERENCE, Bytes, Indices
from sb3_extra_buffers.codecs.delta import COUNT_MASK, KIND_SHIFT, WHOLE, DeltaCodec
from sb3_extra_buffers.codecs.rle import RleCodec
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.gpu_buffers import nvcomp
from sb3_extra_buffers.gpu_buffers.device_arena import DeviceArena
from sb3_extra_buffers.gpu_buffers.transfer import upload
from sb3_extra_buffers.parallel import run_in_slices
from sb3_extra_buffers.storage.frame_store import FrameStore, numbers_from

_AT_ONCE = 1 << 22
"""Bytes of records that are looked at together: finding each byte takes many times the memory that it does."""
_ZSTD_MAGIC = 0xFD2FB528
_MOST_DECODED = 1 << 23


def live_records(store: FrameStore) -> tuple[Indices, Indices, Indices]:
    """Where all records of a store start, how long they are, and their references."""
    counts = store.encoded // store.codec.frames_per_record - store.first_records
    lanes, numbers = numbers_from(store.first_records, counts)
    places = lanes * store.starts.shape[1] + numbers % store.starts.shape[1]
    lengths, references = (part.reshape(-1)[places].astype(np.int64) for part in (store.lengths, store.references))
    return store.starts.reshape(-1)[places], lengths, references


def check_records(store: FrameStore, on_device: bool = False) -> None:
    """Raise :class:`~sb3_extra_buffers.errors.CorruptDataError` unless all records can be decoded.

    :param on_device: Whether all of them are on the device by now, so that it can be asked as well.
    """
    codec = store.codec
    starts, lengths, _ = live_records(store)
    encoded = lengths != codec.record_bytes
    starts, lengths = starts[encoded], lengths[encoded]
    if not len(starts):
        return
    arena = store.arena
    data = arena.data_with_what_is_staged() if isinstance(arena, DeviceArena) else arena.data
    if (starts < 0).any() or (starts + lengths > len(data)).any():
        raise CorruptDataError("A record lies outside the arena.")
    pieces = np.flatnonzero(np.diff(np.cumsum(lengths) // _AT_ONCE)) + 1
    for part in np.split(np.arange(len(starts)), pieces):
        if isinstance(codec, DeltaCodec):
            good = _delta_records(data, starts[part], lengths[part], codec.frames_per_record, codec.frame.nbytes)
        elif isinstance(codec, RleCodec):
            good = _rle_records(data, starts[part], lengths[part], codec)
        else:
            _decode(store, data, starts[part], lengths[part], on_device)
            continue
        if not good.all():
            wrong = part[~good][0]
            raise CorruptDataError(
                f"The {codec.name} record of {lengths[wrong]} bytes at byte {starts[wrong]} is none that could have "
                "been written."
            )


def _delta_records(data: Bytes, starts: Indices, lengths: Indices, group: int, frame_bytes: int) -> npt.NDArray[Any]:
    """Which records are as :mod:`sb3_extra_buffers.codecs.delta` says."""
    n_words = -(-frame_bytes // 4)
    good: npt.NDArray[np.bool_] = lengths >= 4 * group
    safe_starts = np.where(good, starts, 0)
    if len(data) < 4 * group:
        return np.zeros_like(good)
    headers = data[safe_starts[:, None] + np.arange(4 * group)].view("<u4").astype(np.int64)
    kinds, counts = headers >> KIND_SHIFT, headers & COUNT_MASK
    whole = kinds == WHOLE
    good &= ~(whole & (counts != 0)).any(1) & ~(counts > n_words).any(1)
    changed = np.where(whole, n_words, counts).sum(1)
    good &= lengths == 4 * group + 4 * changed + counts.sum(1)
    # The changes of each frame, as skips and words, must end inside of it.
    counts = np.where(good[:, None], counts, 0)
    first_skips = starts + 4 * group + 4 * changed
    skips_at = (first_skips[:, None] + np.cumsum(counts, axis=1) - counts).reshape(-1)
    sums = _sums(data, skips_at, counts.reshape(-1), 1).reshape(counts.shape)
    good &= (sums + counts <= n_words).all(1)
    return good


def _rle_records(data: Bytes, starts: Indices, lengths: Indices, codec: RleCodec) -> npt.NDArray[Any]:
    """Which records are as :mod:`sb3_extra_buffers.codecs.rle` says."""
    run_bytes = codec.runs_type.itemsize
    counts, rest = np.divmod(lengths, run_bytes + codec.element_type.itemsize)
    good: npt.NDArray[np.bool_] = (rest == 0) & (counts > 0)
    counts = np.where(good, counts, 0)
    runs = _integers(data, starts, counts, run_bytes)
    ends = np.cumsum(counts)
    # One by one as well: a sum may wrap around, and a run of nothing is never written, nor understood by kernels.
    odd = np.concatenate([[0], np.cumsum((runs == 0) | (runs > codec.element_count))])
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(runs, dtype=np.uint64)])
    good &= odd[ends] == odd[ends - counts]
    good &= sums[ends] - sums[ends - counts] == codec.element_count
    return good


def _decode(store: FrameStore, data: Bytes, starts: Indices, lengths: Indices, on_device: bool) -> None:
    """Decode records that no kernel here decodes; their codec raises an error if that cannot be done."""
    codec = store.codec
    if codec.name == "zstd":
        magic = _integers(data, starts, np.where(lengths >= 4, 1, 0), 4)
        if len(magic) < len(starts) or (magic != _ZSTD_MAGIC).any():
            raise CorruptDataError("A zstd record does not begin like one.")
    at_once = max(_MOST_DECODED // codec.record_bytes, 1)
    for begin in range(0, len(starts), at_once):
        some = slice(begin, begin + at_once)
        out = np.empty((len(starts[some]), codec.record_bytes), dtype=np.uint8)
        _decode_some(store, data, starts[some], lengths[some], out)
        if on_device:
            _compare_with_device(store, starts[some], lengths[some], out)


def _decode_some(store: FrameStore, data: Bytes, starts: Indices, lengths: Indices, out: Bytes) -> None:
    def work(low: int, high: int) -> None:
        part = slice(low, high)
        references = np.full(high - low, NO_REFERENCE)
        store.codec.decode(data, starts[part], lengths[part], references, out[part])

    run_in_slices(work, len(out), out.nbytes, max(16, len(out) // 8))


def _compare_with_device(store: FrameStore, starts: Indices, lengths: Indices, out: Bytes) -> None:
    """nvCOMP gives the same as libzstd for what the codec writes, but who knows for what else."""
    if isinstance(store.arena, DeviceArena) and nvcomp.is_available(store.arena.device):
        heap = store.arena.heap
        by_device = th.zeros(out.shape, dtype=th.uint8, device=heap.device)
        places = upload(np.stack([starts, lengths]), heap.device)
        nvcomp.decompress_to_rows(places[0] + heap.data_ptr(), places[1], by_device)
        if not np.array_equal(by_device.cpu().numpy(), out):
            raise CorruptDataError("A zstd record is not decoded to the same by the device and by the host.")


def _integers(data: Bytes, starts: Indices, counts: Indices, size: int) -> npt.NDArray[np.uint64]:
    """``counts[i]`` integers of ``size`` bytes from byte ``starts[i]`` on, one after the other."""
    lanes, at = numbers_from(np.zeros_like(counts), counts)
    places = starts[lanes] + at * size
    found: npt.NDArray[np.uint64] = data[places[:, None] + np.arange(size)].view(f"<u{size}")[:, 0].astype(np.uint64)
    return found


def _sums(data: Bytes, starts: Indices, counts: Indices, size: int) -> Indices:
    ends = np.cumsum(counts)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_integers(data, starts, counts, size))])
    found: Indices = (sums[ends] - sums[ends - counts]).astype(np.int64)
    return found
