"""Checks of untrusted records, and of the device's copy of the index.

Kernels trust every record: they cannot raise errors, and checking a record would take as long as decoding it. So all
records that come from a file are checked here, once, on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.codecs.chains import WHOLE
from sb3_extra_buffers.codecs.delta_words import COUNT_MASK, KIND_SHIFT, DeltaWordsCodec
from sb3_extra_buffers.codecs.rle import RleCodec
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.gpu_buffers.kernels import LENGTH_BITS
from sb3_extra_buffers.storage.stacking import numbers_from

if TYPE_CHECKING:
    from sb3_extra_buffers.gpu_buffers.frame_store import DeviceFrameStore

_AT_ONCE = 1 << 22
"""Bytes of records to check at a time. Each byte needs indices of many times its size, so this limits the memory."""


def check_records(store: DeviceFrameStore) -> None:
    """Raise :class:`~sb3_extra_buffers.errors.CorruptDataError` unless all records can be decoded."""
    codec = store.codec
    starts, lengths, _ = store.index.entries(store.index.places(*store.live_records()))
    n_bytes = len(store.arena.heap)
    if (starts < 0).any() or (starts > n_bytes - lengths).any():  # the sum of both could overflow
        raise CorruptDataError(f"A record lies outside the arena, which has {n_bytes:,} bytes.")
    encoded = lengths != codec.record_bytes
    starts, lengths = starts[encoded], lengths[encoded]
    if not len(starts):
        return
    data = store.arena.data
    pieces = np.flatnonzero(np.diff(np.cumsum(lengths) // _AT_ONCE)) + 1
    for part in np.split(np.arange(len(starts)), pieces):
        if isinstance(codec, RleCodec):
            valid = _valid_rle_records(data, starts[part], lengths[part], codec)
        else:
            valid = _valid_delta_records(data, starts[part], lengths[part], codec)
        if not valid.all():
            wrong = part[~valid][0]
            raise CorruptDataError(
                f"The {codec.name} record of {lengths[wrong]} bytes at byte {starts[wrong]} is none that could have "
                "been written."
            )


def check_device_copy(store: DeviceFrameStore) -> None:
    """Raise an error unless the device's copy of the index equals the host's."""
    tensors, places = store.tensors, store.index.places(*store.live_records())
    if tensors.heap.data_ptr() != store.arena.heap.data_ptr():
        raise CorruptDataError("The device reads an old heap.")
    if tensors.records.shape[:2] != store.index.starts.shape:
        raise CorruptDataError("The device's index has another size.")
    entries = tensors.records.cpu().numpy().reshape(-1, 2)[places]
    starts, lengths, references = store.index.entries(places)
    check_same("where records start", entries[:, 0], starts)
    check_same("how long records are", entries[:, 1] & ((1 << LENGTH_BITS) - 1), lengths)
    check_same("what records refer to", entries[:, 1] >> LENGTH_BITS, references)
    check_same("how many frames are in records", tensors.encoded.cpu().numpy(), store.encoded)
    heads = tensors.heads.cpu().numpy()
    if (heads < store.heads).any() or (heads - store.encoded > tensors.ring_frames).any():
        raise CorruptDataError(f"The device cannot have {heads.tolist()} frames.")


def check_same(what: str, on_device: npt.NDArray[Any], on_host: npt.NDArray[Any]) -> None:
    """Raise an error that names the first difference, if the device and the host differ."""
    different = np.argwhere(on_device != on_host)
    if len(different):
        raise CorruptDataError(
            f"The device does not hold what the host does: {what}, at {different[0].tolist()} "
            f"and {len(different) - 1} more places."
        )


def _valid_delta_records(data: Bytes, starts: Indices, lengths: Indices, codec: DeltaWordsCodec) -> npt.NDArray[Any]:
    """Which records follow the format of :mod:`sb3_extra_buffers.codecs.delta_words`."""
    group, n_words = codec.frames_per_record, -(-codec.frame.nbytes // 4)
    valid: npt.NDArray[np.bool_] = lengths >= 4 * group
    safe_starts = np.where(valid, starts, 0)
    if len(data) < 4 * group:
        return np.zeros_like(valid)
    headers = data[safe_starts[:, None] + np.arange(4 * group)].view("<u4").astype(np.int64)
    kinds, counts = headers >> KIND_SHIFT, headers & COUNT_MASK
    whole = kinds == WHOLE
    valid &= ~(whole & (counts != 0)).any(1) & ~(counts > n_words).any(1)
    changed = np.where(whole, n_words, counts).sum(1)
    valid &= lengths == 4 * group + 4 * changed + counts.sum(1)
    # The changes of each frame must end inside the frame: skipped and changed words together fit into it.
    counts = np.where(valid[:, None], counts, 0)
    first_skips = starts + 4 * group + 4 * changed
    skips_at = (first_skips[:, None] + np.cumsum(counts, axis=1) - counts).reshape(-1)
    skipped = _sums(_integers(data, skips_at, counts.reshape(-1), 1), counts.reshape(-1)).astype(np.int64)
    valid &= (skipped.reshape(counts.shape) + counts <= n_words).all(1)
    return valid


def _valid_rle_records(data: Bytes, starts: Indices, lengths: Indices, codec: RleCodec) -> npt.NDArray[Any]:
    """Which records follow the format of :mod:`sb3_extra_buffers.codecs.rle`."""
    run_bytes = codec.runs_type.itemsize
    counts, rest = np.divmod(lengths, run_bytes + codec.element_type.itemsize)
    valid: npt.NDArray[np.bool_] = (rest == 0) & (counts > 0)
    counts = np.where(valid, counts, 0)
    runs = _integers(data, starts, counts, run_bytes)
    # Runs are also checked one by one: their sum may overflow, and kernels cannot decode empty runs.
    is_invalid = (runs == 0) | (runs > codec.element_count)
    valid &= (_sums(is_invalid, counts) == 0) & (_sums(runs, counts) == codec.element_count)
    return valid


def _integers(data: Bytes, starts: Indices, counts: Indices, size: int) -> npt.NDArray[np.uint64]:
    """Read ``counts[i]`` integers of ``size`` bytes from byte ``starts[i]`` on, for each ``i`` in turn."""
    lanes, at = numbers_from(np.zeros_like(counts), counts)
    places = starts[lanes] + at * size
    found: npt.NDArray[np.uint64] = data[places[:, None] + np.arange(size)].view(f"<u{size}")[:, 0].astype(np.uint64)
    return found


def _sums(values: npt.NDArray[Any], counts: Indices) -> npt.NDArray[np.uint64]:
    """The sums of the first ``counts[0]`` values, of the next ``counts[1]``, and so on."""
    ends, sums = np.cumsum(counts), np.append(np.uint64(0), np.cumsum(values, dtype=np.uint64))
    found: npt.NDArray[np.uint64] = sums[ends] - sums[ends - counts]
    return found
