"""What the Triton kernels share. Import only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def every(condition, SIZE: tl.constexpr):
    """A condition for all elements of a block."""
    # Not by broadcasting a truth value, of which Triton's interpreter makes a number that it takes for no mask.
    return (tl.zeros((SIZE,), dtype=tl.int32) + condition.to(tl.int32)) != 0


@triton.jit
def load_word(source, at, mask):
    """Four bytes of ``source`` from ``at`` on, which need not be aligned, as ``int32``."""
    word = tl.load(source + at, mask=mask, other=0).to(tl.int32)
    word |= tl.load(source + at + 1, mask=mask, other=0).to(tl.int32) << 8
    word |= tl.load(source + at + 2, mask=mask, other=0).to(tl.int32) << 16
    word |= tl.load(source + at + 3, mask=mask, other=0).to(tl.int32) << 24
    return word


@triton.jit
def load_header(source):
    """The same for a single word."""
    word = tl.load(source).to(tl.int32)
    word |= tl.load(source + 1).to(tl.int32) << 8
    word |= tl.load(source + 2).to(tl.int32) << 16
    word |= tl.load(source + 3).to(tl.int32) << 24
    return word


@triton.jit
def load_frame_words(source, base, words, mask, FRAME_BYTES: tl.constexpr):
    """The words ``words`` of the frame at byte ``base`` of ``source``, filled up with zeros."""
    if FRAME_BYTES % 4 == 0:
        values = tl.load((source + base).to(tl.pointer_type(tl.int32)) + words, mask=mask, other=0)
    else:
        values = words * 0
        for i in tl.static_range(4):
            byte = 4 * words + i
            found = tl.load(source + base + byte, mask=mask & (byte < FRAME_BYTES), other=0)
            values |= found.to(tl.int32) << (8 * i)
    return values


@triton.jit
def store_integer(target, at, values, mask, BYTES: tl.constexpr):
    """Write integers of some bytes to byte ``at`` of ``target``, which need not be aligned."""
    for i in tl.static_range(BYTES):
        tl.store(target + at + i, ((values >> (8 * i)) & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def copy_frame(source, base, target, at, FRAME_BYTES: tl.constexpr, BLOCK: tl.constexpr):
    for begin in range(0, FRAME_BYTES, BLOCK):
        byte = begin + tl.arange(0, BLOCK)
        values = tl.load(source + base + byte, mask=byte < FRAME_BYTES, other=0)
        tl.store(target + at + byte, values, mask=byte < FRAME_BYTES)


@triton.jit
def _larger(left, right):
    return tl.maximum(left, right)


@triton.jit
def last_mark(at, is_marked_before, earlier):
    """The last mark before each of the elements ``at``, where it is known whether the one before each is marked.

    :param earlier: The last mark before all of them.
    """
    return tl.maximum(tl.associative_scan(tl.where(is_marked_before, at - 1, -1), 0, _larger), earlier)


@triton.jit
def store_words(out, base, words, values, mask, FRAME_BYTES: tl.constexpr):
    """Write ``values`` as the words ``words`` of the frame at byte ``base`` of ``out``."""
    if FRAME_BYTES % 4 == 0:
        target = (out + base).to(tl.pointer_type(tl.int32))
        tl.store(target + words, values, mask=mask)
    else:
        for i in tl.static_range(4):
            byte = 4 * words + i
            tl.store(out + base + byte, (values >> (8 * i)).to(tl.uint8), mask=mask & (byte < FRAME_BYTES))


@triton.jit
def copy_bytes(source, at, out_0, base_0, to_0, out_1, base_1, to_1, FRAME_BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a frame that lies at any byte of ``source``."""
    for begin in range(0, FRAME_BYTES, BLOCK):
        byte = begin + tl.arange(0, BLOCK)
        values = tl.load(source + at + byte, mask=byte < FRAME_BYTES, other=0)
        tl.store(out_0 + base_0 + byte, values, mask=(byte < FRAME_BYTES) & every(to_0, BLOCK))
        tl.store(out_1 + base_1 + byte, values, mask=(byte < FRAME_BYTES) & every(to_1, BLOCK))


@triton.jit
def fill_zero(out_0, base_0, to_0, out_1, base_1, to_1, FRAME_BYTES: tl.constexpr, BLOCK: tl.constexpr):
    for begin in range(0, FRAME_BYTES, BLOCK):
        byte = begin + tl.arange(0, BLOCK)
        zero = tl.zeros((BLOCK,), dtype=tl.uint8)
        tl.store(out_0 + base_0 + byte, zero, mask=(byte < FRAME_BYTES) & every(to_0, BLOCK))
        tl.store(out_1 + base_1 + byte, zero, mask=(byte < FRAME_BYTES) & every(to_1, BLOCK))


@triton.jit
def copy_fields(
    fields,
    slot,
    lane,
    row,
    actions,
    rewards,
    dones,
    ROW_WORDS: tl.constexpr,
    ACTION_WORDS: tl.constexpr,
    ACTION_BLOCK: tl.constexpr,
    ACTIONS_AT: tl.constexpr,
    REWARDS_AT: tl.constexpr,
    DONES_AT: tl.constexpr,
    TIMEOUTS_AT: tl.constexpr,
):
    """Actions, rewards and dones of one transition. Offsets are in words."""
    source = fields + slot * ROW_WORDS
    actions = actions.to(tl.pointer_type(tl.int32))
    word = tl.arange(0, ACTION_BLOCK)
    values = tl.load(source + ACTIONS_AT + lane * ACTION_WORDS + word, mask=word < ACTION_WORDS, other=0)
    tl.store(actions + row * ACTION_WORDS + word, values, mask=word < ACTION_WORDS)
    tl.store(rewards + row, tl.load(source + REWARDS_AT + lane).to(tl.float32, bitcast=True))
    done = tl.load(source + DONES_AT + lane).to(tl.float32, bitcast=True)
    timeout = tl.load(source + TIMEOUTS_AT + lane).to(tl.float32, bitcast=True)
    tl.store(dones + row, done * (1 - timeout))
