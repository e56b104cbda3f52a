"""Compiled form of :mod:`.bitpack`. Import through :func:`sb3_extra_buffers.compiled.load_kernels` only.

A block is one vector. The decoder runs the same instructions for every block: predictor, width and offset are numbers
that it loads, not branches that it takes, so there is nothing to mispredict. All places in memory are addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from sb3_extra_buffers.codecs.bitpack import BLOCK_BYTES, N_PREDICTORS
from sb3_extra_buffers.codecs.memory_kernels import (
    BYTE,
    INTEGER,
    LANE_INDEX,
    copy,
    emit_load,
    emit_repeated,
    emit_store,
    leading_zeros,
    load16,
    load_int,
    store16,
)

_BYTES, _WORDS = ir.VectorType(BYTE, BLOCK_BYTES), ir.VectorType(INTEGER, BLOCK_BYTES // 8)
_PREDICTOR_BYTES = 32


def _number(value: int) -> Any:
    return ir.Constant(INTEGER, value)


def _differences(builder: Any, source: Any, places: Any) -> Any:
    """For intrinsics: a block minus its prediction."""
    block, first, second, third = (emit_load(builder, place, _BYTES) for place in (source, *places))
    return builder.add(builder.sub(builder.sub(block, first), second), third)


def _fields_of(width: int) -> Iterator[tuple[int, int, int]]:
    """How an integer of eight fields, ``width`` bits each, becomes eight bytes: in three steps.

    The first step moves the upper four fields up to bit 32. The next ones do the same in both halves and in all four
    quarters of the integer. Each step is yielded as the distance to move, and the masks of what stays and of what has
    moved.
    """
    for bits in (32, 16, 8):
        used = width * bits // 8
        lower = ((1 << used) - 1) * sum(1 << at for at in range(0, 64, 2 * bits))
        yield bits - used, lower, lower << bits


_FIELDS = [number for width in range(9) for step in _fields_of(width) for number in step]


def _fields(builder: Any, width: Any) -> Iterator[tuple[Any, Any, Any]]:
    """For intrinsics: :func:`_fields_of` a width that is not known before the kernel runs."""
    numbers = ir.ArrayType(INTEGER, len(_FIELDS))
    table = cgutils.global_constant(builder.module, "bitpack.fields", ir.Constant(numbers, _FIELDS))  # type: ignore[no-untyped-call]
    first = builder.mul(width, _number(9))
    for i in range(0, 9, 3):
        places = [builder.gep(table, [_number(0), builder.add(first, _number(i + j))], inbounds=True) for j in range(3)]
        distance, lower, upper = (emit_repeated(builder, builder.load(place), _WORDS) for place in places)
        yield distance, lower, upper


def _unpack_block(
    typing_context: Any, target: Any, packed: Any, width: Any, offset: Any, first: Any, second: Any, third: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, packed, width, offset, *places = arguments
        words = ir.Constant(_WORDS, ir.Undefined)
        for i in range(_WORDS.count):
            word = emit_load(builder, builder.add(packed, builder.mul(width, _number(i))), INTEGER)
            words = builder.insert_element(words, word, ir.Constant(LANE_INDEX, i))
        for distance, lower, upper in _fields(builder, width):
            moved = builder.and_(builder.shl(words, distance), upper)
            words = builder.or_(builder.and_(words, lower), moved)
        block = builder.add(builder.bitcast(words, _BYTES), emit_repeated(builder, offset, _BYTES))
        first, second, third = (emit_load(builder, place, _BYTES) for place in places)
        block = builder.add(block, builder.sub(builder.add(first, second), third))
        emit_store(builder, block, target)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7), generate


def _pack_block(
    typing_context: Any, packed: Any, source: Any, width: Any, offset: Any, first: Any, second: Any, third: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        packed, source, width, offset, *places = arguments
        differences = _differences(builder, source, places)
        words = builder.bitcast(builder.sub(differences, emit_repeated(builder, offset, _BYTES)), _WORDS)
        for distance, lower, upper in reversed(list(_fields(builder, width))):
            moved = builder.lshr(builder.and_(words, upper), distance)
            words = builder.or_(builder.and_(words, lower), moved)
        for i in range(_WORDS.count):
            word = builder.extract_element(words, ir.Constant(LANE_INDEX, i))
            emit_store(builder, word, builder.add(packed, builder.mul(width, _number(i))))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7), generate


def _extremes(typing_context: Any, source: Any, bias: Any, first: Any, second: Any, third: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, bias, *places = arguments
        values = builder.xor(_differences(builder, source, places), emit_repeated(builder, bias, _BYTES))
        kind, found = ir.FunctionType(BYTE, [_BYTES]), []
        for name in ("umin", "umax"):
            name = f"llvm.vector.reduce.{name}.v{BLOCK_BYTES}i8"
            reduce = cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]
            found.append(builder.zext(builder.call(reduce, [values]), INTEGER))
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(types.int64, 2)(*[types.intp] * 5), generate  # type: ignore[no-untyped-call]


unpack_block: Any = intrinsic(_unpack_block)
"""``unpack_block(target, packed, width, offset, first, second, third)``: decode a block to ``target``.

It is predicted as the bytes at ``first``, plus those at ``second``, minus those at ``third``. Up to 8 bytes after the
packed differences are read.
"""
pack_block: Any = intrinsic(_pack_block)
"""``pack_block(packed, source, width, offset, first, second, third)``: write the differences of a block, and up to 8
bytes after them."""
extremes: Any = intrinsic(_extremes)
"""``extremes(source, bias, first, second, third)``: the smallest and the largest difference of a block, all of them XOR
``bias``."""


@njit(nogil=True, cache=True)
def _places(block: int, entry: int, zeros: int) -> tuple[int, int, int]:
    """The three addresses from which a predictor predicts a block.

    :param entry: The address of the predictor in the codec's table.
    :param zeros: The address of the table. Its first entry is all zeros, so it serves as a block of zeros.
    """
    first, second, third = load_int(entry + 8), load_int(entry + 16), load_int(entry + 24)
    return block - first if first else zeros, block - second if second else zeros, block - third if third else zeros


@njit(nogil=True, cache=True)
def unpack_frame(target: int, size: int, at: int, end: int, predictors: int) -> bool:
    """Decode the bytes from ``at`` to ``end`` to the frame at ``target``; false if they are corrupt."""
    n_blocks = size // BLOCK_BYTES
    header, position = at, np.int64(0)
    at += 2 * n_blocks
    if at > end:
        return False
    for number in range(n_blocks):
        word = load16(header + 2 * number)
        entry, width = predictors + _PREDICTOR_BYTES * (word & 15), (word >> 4) & 15
        if width > 8 or at + 4 * width > end or load_int(entry) > position:
            return False
        block = target + position
        first, second, third = _places(block, entry, predictors)
        unpack_block(block, at, width, word >> 8, first, second, third)
        at, position = at + 4 * width, position + BLOCK_BYTES
    if end - at != size - position:
        return False
    copy(target + position, at, size - position)
    return True


@njit(nogil=True, cache=True)
def pack_frame(frame: int, size: int, out: int, predictors: int) -> int:
    """Encode a frame to ``out``, and return the number of bytes written."""
    n_blocks = size // BLOCK_BYTES
    at, position = out + 2 * n_blocks, np.int64(0)
    for number in range(n_blocks):
        block = frame + position
        width, offset, chosen = np.int64(9), np.int64(0), np.int64(0)
        for i in range(N_PREDICTORS):
            entry = predictors + _PREDICTOR_BYTES * i
            reach = load_int(entry)
            if reach > position or (reach == 0 and i > 0):
                continue
            # Differences from a prediction are near zero, so they are compared as signed numbers.
            bias = 128 if i else 0
            first, second, third = _places(block, entry, predictors)
            lowest, highest = extremes(block, bias, first, second, third)
            needed = 64 - leading_zeros(np.uint64(highest - lowest))
            if needed < width:
                width, offset, chosen = needed, lowest ^ bias, i
                if width == 0:
                    break
        first, second, third = _places(block, predictors + _PREDICTOR_BYTES * chosen, predictors)
        store16(out + 2 * number, chosen | width << 4 | offset << 8)
        pack_block(at, block, width, offset, first, second, third)
        at, position = at + 4 * width, position + BLOCK_BYTES
    copy(at, frame + position, size - position)
    return at + size - position - out
