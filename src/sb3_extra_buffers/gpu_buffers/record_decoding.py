"""Batches from records for which there is no kernel here: each record needed is decoded once, then frames are copied.

nvCOMP decodes ``zstd`` on the GPU. Without it the host does, on all cores: compressed records come to it in one
transfer, and frames go back in one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch as th

from sb3_extra_buffers.codecs.base import NO_REFERENCE, Bytes, Codec, Indices
from sb3_extra_buffers.codecs.zstd import ZstdCodec
from sb3_extra_buffers.gpu_buffers import nvcomp
from sb3_extra_buffers.gpu_buffers.kernels.frames import windows
from sb3_extra_buffers.gpu_buffers.raw_buffer import pack_segments
from sb3_extra_buffers.gpu_buffers.transfer import to_device, upload
from sb3_extra_buffers.parallel import core_count, run_in_slices
from sb3_extra_buffers.storage.frame_store import FrameStore

_FEWEST_IN_A_SLICE = 16


class RecordPlan(NamedTuple):
    """What a batch is made of."""

    starts: Indices
    lengths: Indices
    """Of the records needed, raw ones last."""
    n_compressed: int
    """The records that are not raw."""
    waiting: Bytes
    """Frames that are in no record yet."""
    sources: Indices
    """For each frame wanted, (n, batches, stack), its number: frames of records come first, then those that wait, then
    one of zeros, for observations that were never written."""


def plan_records(store: FrameStore, lanes: Indices, firsts: Indices) -> RecordPlan:
    """For observations that begin at the frames ``firsts``, (batches, n), of ``lanes``."""
    codec, capacity = store.codec, store.starts.shape[1]
    group = codec.frames_per_record
    wanted = firsts.T[:, :, None] + np.arange(store.layout.stack)
    all_lanes = np.broadcast_to(lanes[:, None, None], wanted.shape)
    waits = wanted >= store.encoded[all_lanes]
    in_record = (wanted >= 0) & ~waits
    places = (all_lanes * capacity + wanted // group % capacity)[in_record]
    records, rows = np.unique(places, return_inverse=True)
    lengths = store.lengths.reshape(-1)[records].astype(np.int64)
    is_raw = lengths == codec.record_bytes
    order = np.argsort(is_raw, kind="stable")
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order))
    waiting = store.ring[all_lanes[waits], wanted[waits] % store.ring.shape[1]]
    n_decoded = len(records) * group
    sources = np.full(wanted.shape, n_decoded + len(waiting))
    sources[in_record] = ranks[rows] * group + wanted[in_record] % group
    sources[waits] = np.arange(n_decoded, n_decoded + len(waiting))
    starts = store.starts.reshape(-1)[records]
    return RecordPlan(starts[order], lengths[order], int(len(records) - is_raw.sum()), waiting, sources)


def decode_plan(plan: RecordPlan, codec: Codec, heap: th.Tensor) -> th.Tensor:
    """The observations, (n, batches, stack, bytes of a frame), on the device of ``heap``."""
    device, group, frame_bytes = heap.device, codec.frames_per_record, codec.frame.nbytes
    n_decoded = len(plan.starts) * group
    shape = (n_decoded + len(plan.waiting) + 1, frame_bytes)
    if isinstance(codec, ZstdCodec) and nvcomp.is_available(device):
        frames = th.empty(shape, dtype=th.uint8, device=device)
        frames[-1] = 0
        if len(plan.waiting):
            frames[n_decoded:-1] = upload(plan.waiting, device)
        _decode_on_device(plan, heap, frames[:n_decoded].view(-1, codec.record_bytes))
    else:
        staged = th.empty(shape, dtype=th.uint8, pin_memory=device.type == "cuda")
        array = staged.numpy()
        array[-1] = 0
        array[n_decoded:-1] = plan.waiting
        _decode_on_host(plan, codec, heap, array[:n_decoded].reshape(-1, codec.record_bytes))
        frames = to_device(staged, device)
    return frames[upload(plan.sources, device)]


def _decode_on_device(plan: RecordPlan, heap: th.Tensor, out: th.Tensor) -> None:
    places = upload(np.stack([plan.starts, plan.lengths]), heap.device)
    n = plan.n_compressed
    if n:
        nvcomp.decompress_to_rows(places[0, :n] + heap.data_ptr(), places[1, :n], out[:n])
    if n < len(out):
        out[n:] = windows(heap, places[0, n:], out.shape[1])


def _decode_on_host(plan: RecordPlan, codec: Codec, heap: th.Tensor, out: Bytes) -> None:
    lengths = plan.lengths
    packed = _to_host(pack_segments(heap, th.from_numpy(plan.starts), th.from_numpy(lengths)))
    starts, references = np.cumsum(lengths) - lengths, np.full(len(lengths), NO_REFERENCE)

    def work(low: int, high: int) -> None:
        part = slice(low, high)
        codec.decode(packed, starts[part], lengths[part], references[part], out[part])

    largest = max(_FEWEST_IN_A_SLICE, -(-len(out) // core_count()))
    run_in_slices(work, len(out), out.nbytes, largest)


def _to_host(tensor: th.Tensor) -> Bytes:
    """The device is waited for."""
    staged = th.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    staged.copy_(tensor)
    array: Bytes = staged.numpy()
    return array
