"""Whether a device holds what the host believes that it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.gpu_buffers.delta_codec import BatchDeltaCodec
from sb3_extra_buffers.gpu_buffers.kernels.frames import LENGTH_BITS
from sb3_extra_buffers.gpu_buffers.record_validation import check_records, live_records
from sb3_extra_buffers.storage.frame_store import numbers_from

if TYPE_CHECKING:
    from sb3_extra_buffers.gpu_buffers.tensor_frame_store import TensorFrameStore


def check_same(what: str, on_device: npt.NDArray[Any], on_host: npt.NDArray[Any]) -> None:
    """Raise an error that says where the two differ."""
    different = np.argwhere(on_device != on_host)
    if len(different):
        raise CorruptDataError(
            f"The device does not hold what the host does: {what}, at {different[0].tolist()} "
            f"and {len(different) - 1} more places."
        )


def check_frames(store: TensorFrameStore) -> None:
    """All invariants of records and of the device's copy."""
    _check_counts(store)
    starts, lengths, references = live_records(store)
    _check_places(store, starts, lengths)
    if isinstance(store.codec, BatchDeltaCodec):
        _check_uses(store.codec, references)
    check_records(store)
    if not store.has_changed:
        _check_copy(store)


def _check_counts(store: TensorFrameStore) -> None:
    group = store.codec.frames_per_record
    records = store.encoded // group
    if (
        (store.encoded % group).any()
        or (store.encoded > store.heads).any()
        or (store.first_records > records).any()
        or (records - store.first_records > store.starts.shape[1]).any()
        or (not store.is_ahead and (store.heads - store.encoded > store.ring.shape[1]).any())
    ):
        raise CorruptDataError("The numbers of frames, of records and of waiting frames do not agree.")


def _check_places(store: TensorFrameStore, starts: Indices, lengths: Indices) -> None:
    arena = store.arena
    order = np.argsort(starts, kind="stable")
    ends = (starts + lengths)[order]
    if (starts[order][1:] < ends[:-1]).any():
        raise CorruptDataError("Two records overlap.")
    high = arena.head if arena.wrap is None else arena.wrap
    inside = (starts >= arena.tail) & (starts + lengths <= high)
    if arena.wrap is not None:
        inside |= starts + lengths <= arena.head
    if not inside.all() or high > arena.size:
        raise CorruptDataError("A record lies where the arena has nothing.")


def _check_uses(codec: BatchDeltaCodec, references: Indices) -> None:
    n = len(codec.uses)
    if len(references) and (references.min() < 0 or references.max() >= n):
        raise CorruptDataError("A record names a reference that does not exist.")
    expected = np.bincount(references, minlength=n) + np.bincount(codec.current, minlength=n)
    different = np.flatnonzero(expected[1:] != codec.uses[1:]) + 1
    if len(different):
        number = different[0]
        raise CorruptDataError(
            f"Reference {number} counts {codec.uses[number]} uses, but {expected[number]} records and lanes name it."
        )


def _check_copy(store: TensorFrameStore) -> None:
    copy, capacity = store.copy, store.starts.shape[1]
    if copy.heap.data_ptr() != store.arena.heap.data_ptr():
        raise CorruptDataError("The device reads an old heap.")
    group = store.codec.frames_per_record
    lanes, numbers = numbers_from(store.first_records, store.encoded // group - store.first_records)
    places = lanes * capacity + numbers % capacity
    if copy.records.shape[1] == capacity:
        entries = copy.records.cpu().numpy().reshape(-1, 2)[places]
        check_same("where records start", entries[:, 0], store.starts.reshape(-1)[places])
        lengths = store.lengths.reshape(-1)[places]
        check_same("how long records are", entries[:, 1] & ((1 << LENGTH_BITS) - 1), lengths)
        check_same("what records refer to", entries[:, 1] >> LENGTH_BITS, store.references.reshape(-1)[places])
    elif len(places):
        raise CorruptDataError("The device's index has another size.")
    if copy.any_waiting:
        check_same("how many frames are in records", copy.encoded.cpu().numpy(), store.encoded)
    if store.is_ahead:
        return  # the rest is known to the device alone
    codec = store.codec
    if isinstance(codec, BatchDeltaCodec):
        used = np.flatnonzero(codec.uses)
        table = copy.table.cpu().numpy().view(np.uint32)
        if used[-1] >= len(table):
            raise CorruptDataError("A reference is not on the device.")
        check_same("reference frames", table[used], codec.reference_frames[used])
    lanes, numbers = numbers_from(store.encoded, store.heads - store.encoded)
    positions = numbers % store.ring.shape[1]
    if len(lanes):
        check_same("waiting frames", copy.ring.cpu().numpy()[lanes, positions], store.ring[lanes, positions])
