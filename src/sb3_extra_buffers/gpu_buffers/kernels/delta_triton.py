"""Observations rebuilt from ``delta`` records, a batch in one launch; see :mod:`.gather_triton`."""

from __future__ import annotations

import triton
import triton.language as tl

from sb3_extra_buffers.codecs import delta as delta_format
from sb3_extra_buffers.gpu_buffers.kernels.batch import ObservationBatch
from sb3_extra_buffers.gpu_buffers.kernels.device_functions import every, load_header, load_word, store_words
from sb3_extra_buffers.gpu_buffers.kernels.frames import LENGTH_BITS, DeviceFrames
from sb3_extra_buffers.gpu_buffers.kernels.gather_triton import NOT_SPECIALIZED, begin_frame, launch_gather
from sb3_extra_buffers.gpu_buffers.kernels.launching import Launcher, block_size

_KIND_SHIFT = tl.constexpr(delta_format.KIND_SHIFT)
_COUNT_MASK = tl.constexpr(delta_format.COUNT_MASK)
_PREVIOUS = tl.constexpr(delta_format.PREVIOUS)
_ZERO = tl.constexpr(delta_format.ZERO)
_WHOLE = tl.constexpr(delta_format.WHOLE)
_LENGTH_BITS = tl.constexpr(LENGTH_BITS)


@triton.jit
def _write_base(
    kind, table, reference, heap, words_at, out_0, base_0, to_0, out_1, base_1, to_1,
    FRAME_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the changes of a frame are applied to."""
    n_words: tl.constexpr = (FRAME_BYTES + 3) // 4
    source = table + reference * n_words
    for begin in range(0, n_words, BLOCK):
        word = begin + tl.arange(0, BLOCK)
        mask = word < n_words
        values = tl.load(source + word, mask=mask & every(kind != _ZERO, BLOCK), other=0)
        if kind == _WHOLE:
            values = load_word(heap, words_at + 4 * word, mask)
        store_words(out_0, base_0, word, values, mask & every(to_0, BLOCK), FRAME_BYTES)
        store_words(out_1, base_1, word, values, mask & every(to_1, BLOCK), FRAME_BYTES)


@triton.jit
def _write_changes(
    heap, words_at, skips_at, count, out_0, base_0, to_0, out_1, base_1, to_1,
    FRAME_BYTES: tl.constexpr, CHANGES: tl.constexpr,
):  # fmt: skip
    n_words: tl.constexpr = (FRAME_BYTES + 3) // 4
    done = 0
    for begin in range(0, count, CHANGES):
        change = begin + tl.arange(0, CHANGES)
        mask = change < count
        skip = tl.load(heap + skips_at + change, mask=mask, other=0).to(tl.int32)
        step = tl.where(mask, skip + 1, 0)
        place = done + tl.cumsum(step, 0) - 1
        value = load_word(heap, words_at + 4 * change, mask)
        mask &= place < n_words
        store_words(out_0, base_0, place, value, mask & every(to_0, CHANGES), FRAME_BYTES)
        store_words(out_1, base_1, place, value, mask & every(to_1, CHANGES), FRAME_BYTES)
        done += tl.sum(step, 0)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def _gather_delta(
    places, ends_0, ends_1, records, heap, table, ring, encoded, out_0, out_1, fields, actions, rewards, dones,
    n, n_envs, capacity, ring_frames,
    STACK: tl.constexpr, PAIR: tl.constexpr, WAITING: tl.constexpr, GROUP: tl.constexpr, FRAME_BYTES: tl.constexpr,
    BLOCK: tl.constexpr, ROW_WORDS: tl.constexpr, ACTION_WORDS: tl.constexpr, ACTION_BLOCK: tl.constexpr,
    ACTIONS_AT: tl.constexpr, REWARDS_AT: tl.constexpr, DONES_AT: tl.constexpr, TIMEOUTS_AT: tl.constexpr,
    CHANGES: tl.constexpr,
):  # fmt: skip
    left, start, packed, position, base_0, to_0, base_1, to_1 = begin_frame(
        places, ends_0, ends_1, records, heap, ring, encoded, out_0, out_1, fields, actions, rewards, dones,
        n, n_envs, capacity, ring_frames, STACK, PAIR, WAITING, GROUP, FRAME_BYTES, BLOCK,
        ROW_WORDS, ACTION_WORDS, ACTION_BLOCK, ACTIONS_AT, REWARDS_AT, DONES_AT, TIMEOUTS_AT,
    )  # fmt: skip
    if left == 0:
        return
    reference = packed >> _LENGTH_BITS
    n_words: tl.constexpr = (FRAME_BYTES + 3) // 4
    words_at = start + 4 * GROUP
    skips_at = words_at
    for link in tl.static_range(GROUP):
        header = load_header(heap + start + 4 * link)
        whole = ((header >> _KIND_SHIFT) & 3) == _WHOLE
        skips_at += 4 * tl.where(whole, n_words, header & _COUNT_MASK)
    for link in range(position + 1):
        header = load_header(heap + start + 4 * link)
        kind = (header >> _KIND_SHIFT) & 3
        count = tl.where(kind == _WHOLE, 0, header & _COUNT_MASK)
        if (link == 0) | (kind != _PREVIOUS):
            _write_base(
                kind, table, reference, heap, words_at, out_0, base_0, to_0, out_1, base_1, to_1, FRAME_BYTES, BLOCK
            )  # fmt: skip
        # Changes overwrite what other threads of the program have just written.
        tl.debug_barrier()
        _write_changes(
            heap, words_at, skips_at, count, out_0, base_0, to_0, out_1, base_1, to_1, FRAME_BYTES, CHANGES
        )  # fmt: skip
        tl.debug_barrier()
        words_at += 4 * tl.where(kind == _WHOLE, n_words, count)
        skips_at += count


_launch = Launcher(_gather_delta, n_warps=2)


def gather_delta(frames: DeviceFrames, batch: ObservationBatch) -> None:
    launch_gather(_launch, frames, batch, block_size(-(-frames.frame_bytes // 4)), (256,))
