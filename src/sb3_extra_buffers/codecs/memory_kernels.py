"""Access to memory and calls of C functions by address. Import through kernel modules only.

In every loop that copies bytes between arrays, numba checks their bounds and whether they overlap, which takes longer
than copying a few bytes. The functions of this module check nothing: their callers make sure that all bytes that are
read and written exist. They consist of LLVM's vector operations, which work on every processor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

INT, INTS, INTS_2D = types.int64, types.int64[::1], types.int64[:, ::1]
WORDS_2D, FRAMES = types.uint32[:, ::1], types.uint8[:, :, ::1]
STORED = types.Array(types.uint8, 1, "C", readonly=True)
"""The bytes of an arena, in memory or in a file that may be read-only."""

BYTE, LANE_INDEX, INTEGER = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FALSE = ir.Constant(ir.IntType(1), 0)

VECTOR_BYTES = 64
"""No function here reads or writes more than this many bytes beyond those that it is asked for."""


def emit_load(builder: Any, address: Any, kind: Any) -> Any:
    """For intrinsics: read a number or a vector from any address, aligned or not."""
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def emit_store(builder: Any, value: Any, address: Any) -> None:
    """For intrinsics: write a number or a vector to any address, aligned or not."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1


def emit_repeated(builder: Any, value: Any, kind: Any) -> Any:
    """For intrinsics: a vector whose elements are all ``value``."""
    undefined = ir.Constant(kind, ir.Undefined)
    if value.type != kind.element:
        value = builder.trunc(value, kind.element)
    first = builder.insert_element(undefined, value, ir.Constant(LANE_INDEX, 0))
    return builder.shuffle_vector(
        first, undefined, ir.Constant(ir.VectorType(LANE_INDEX, kind.count), [0] * kind.count)
    )


def _loading(n_bits: int, kind: Any = types.int64) -> Any:
    def load(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = emit_load(builder, arguments[0], ir.IntType(n_bits))
            return value if n_bits == 64 else builder.zext(value, INTEGER)

        return kind(types.intp), generate

    return intrinsic(load)


def _storing(n_bits: int) -> Any:
    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = arguments[1] if n_bits == 64 else builder.trunc(arguments[1], ir.IntType(n_bits))
            emit_store(builder, value, arguments[0])
            return context.get_dummy_value()

        return types.void(types.intp, types.uint64 if n_bits == 64 else types.int64), generate

    return intrinsic(store)


def _copying(n_bytes: int) -> Any:
    def copy(typing_context: Any, target: Any, source: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit_store(builder, emit_load(builder, arguments[1], ir.VectorType(BYTE, n_bytes)), arguments[0])
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), generate

    return intrinsic(copy)


def _store_first_bytes(builder: Any, vector: Any, address: Any, count: Any) -> None:
    """Write the first ``count`` of 32 bytes. The others keep their values."""
    kind = ir.VectorType(BYTE, 32)
    chosen = builder.icmp_unsigned("<", ir.Constant(kind, list(range(32))), emit_repeated(builder, count, kind))
    emit_store(
        builder, builder.select(chosen, builder.bitcast(vector, kind), emit_load(builder, address, kind)), address
    )


def _copy_first32(typing_context: Any, target: Any, source: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, source, count = arguments
        _store_first_bytes(builder, emit_load(builder, source, ir.VectorType(BYTE, 32)), target, count)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


def _write_first32(
    typing_context: Any, target: Any, first: Any, second: Any, third: Any, fourth: Any, count: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.Constant(ir.VectorType(INTEGER, 4), ir.Undefined)
        for lane in range(4):
            vector = builder.insert_element(vector, arguments[1 + lane], ir.Constant(LANE_INDEX, lane))
        _store_first_bytes(builder, vector, arguments[0], arguments[5])
        return context.get_dummy_value()

    number = types.uint64
    return types.void(types.intp, number, number, number, number, types.intp), generate


def _equal_bytes(typing_context: Any, first: Any, second: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = [emit_load(builder, address, ir.VectorType(BYTE, 64)) for address in arguments]
        return builder.bitcast(builder.icmp_unsigned("==", *values), INTEGER)

    return types.uint64(types.intp, types.intp), generate


def _counting(operation: str, *options: Any) -> Any:
    def count(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return getattr(builder, operation)(arguments[0], *options)

        return types.int64(types.uint64), generate

    return intrinsic(count)


load8, load16, load32, load64 = _loading(8), _loading(16), _loading(32), _loading(64, types.uint64)
"""``load8(address)`` and others: read an unsigned number of 8 or more bits."""
load_int = _loading(64)
"""``load_int(address)``: read a signed number of 64 bits."""
store8, store16, store32, store64 = _storing(8), _storing(16), _storing(32), _storing(64)
"""``store8(address, value)`` and others: write the lowest 8 or more bits of a number."""
copy16, copy32, copy64 = _copying(16), _copying(32), _copying(64)
"""``copy16(target, source)`` and others: copy 16 or more bytes."""
copy_first32: Any = intrinsic(_copy_first32)
"""``copy_first32(target, source, count)``: copy up to 32 bytes."""
write_first32: Any = intrinsic(_write_first32)
"""``write_first32(target, first, second, third, fourth, count)``: write up to 32 bytes of four 64-bit numbers."""
equal_bytes: Any = intrinsic(_equal_bytes)
"""``equal_bytes(first, second)``: bit ``i`` says whether the bytes ``i`` of two blocks of 64 bytes are equal."""
trailing_zeros, leading_zeros = _counting("cttz", _FALSE), _counting("ctlz", _FALSE)
"""The number of zero bits below the lowest one, or above the highest one; 64 for zero."""
count_ones = _counting("ctpop")


def _call(typing_context: Any, address: Any, arguments: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        n, integer = signature.args[1].count, ir.IntType(64)
        passed = [builder.extract_value(values[1], i) for i in range(n)]
        function = builder.inttoptr(values[0], ir.FunctionType(integer, [integer] * n).as_pointer())
        return builder.call(function, passed)

    integers = types.UniTuple(types.intp, len(arguments))  # type: ignore[no-untyped-call]
    return types.intp(types.intp, integers), generate


call: Any = intrinsic(_call)
"""``call(address, arguments)``: call a C function with a tuple of integers or pointers, and return its integer result.

The address is a plain integer, so that numba can cache the kernel on disk. It cannot cache kernels that refer to
``ctypes`` objects.
"""


@njit(nogil=True, cache=True)
def address(array: npt.NDArray[Any]) -> int:
    return np.intp(array.ctypes.data)  # in numba, the sum of an unsigned and a signed number is a float


@njit(nogil=True, cache=True)
def n_equal_bytes(first: int, second: int, known: int, limit: int) -> int:
    """How many bytes at two addresses are equal, up to the first difference or to ``limit``; at least ``known``."""
    while known < limit:
        different = ~equal_bytes(first + known, second + known)
        if different:
            known += trailing_zeros(different)
            break
        known += VECTOR_BYTES
    return min(known, limit)


@njit(nogil=True, cache=True)
def copy(target: int, source: int, size: int) -> None:
    """Copy ``size`` bytes between places that do not overlap.

    For the frames of a batch that is larger than the cache, this is faster than C's ``memcpy``.
    """
    at = 0
    while at + 128 <= size:
        for part in range(at, at + 128, 32):
            copy32(target + part, source + part)
        at += 128
    while at + 8 <= size:
        store64(target + at, load64(source + at))
        at += 8
    while at < size:
        store8(target + at, load8(source + at))
        at += 1


@njit(nogil=True, cache=True)
def copy_some(target: int, source: int, size: int) -> None:
    """Copy a few bytes. Where both places overlap, ``source`` must be at least 32 bytes before ``target``.

    Up to 32 bytes after the last one are read, and written back unchanged: no other thread may write to them meanwhile.
    """
    while size > 32:
        copy32(target, source)
        target, source, size = target + 32, source + 32, size - 32
    copy_first32(target, source, size)


@njit(nogil=True, cache=True)
def repeat(target: int, distance: int, size: int) -> None:
    """Write ``size`` bytes, each a copy of the one ``distance`` before it. ``distance`` is from 1 to 31.

    Up to 32 bytes after the last one are read, and written back unchanged: no other thread may write to them meanwhile.
    """
    if distance > 8:
        while size > 8:
            store64(target, load64(target - distance))
            target, size = target + 8, size - 8
        _store_first(target, load64(target - distance), size)
        return
    # The first 32 repeated bytes, in registers: reading back what was just written would take far longer.
    first, length = load64(target - distance), distance
    while length < 8:
        n_bits = np.uint64(8 * length)
        first = (first & ((np.uint64(1) << n_bits) - np.uint64(1))) | (first << n_bits)
        length *= 2
    second = _from_byte(first, 8 % distance, distance)
    third = _from_byte(first, 16 % distance, distance)
    fourth = _from_byte(first, 24 % distance, distance)
    whole = 32 - 32 % distance  # whole repetitions
    while size > whole:
        write_first32(target, first, second, third, fourth, whole)
        target, size = target + whole, size - whole
    write_first32(target, first, second, third, fourth, size)


@njit(nogil=True, cache=True)
def _from_byte(pattern: int, start: int, period: int) -> int:
    """Eight bytes of a pattern that repeats every ``period`` bytes, from byte ``start`` on."""
    if start == 0:
        return pattern
    return (pattern >> np.uint64(8 * start)) | (pattern << np.uint64(8 * (8 - 8 % period - start)))


@njit(nogil=True, cache=True)
def _store_first(target: int, value: int, count: int) -> None:
    """Write the lowest ``count`` bytes of ``value``."""
    mask = ~np.uint64(0) >> np.uint64(64 - 8 * count) if count > 0 else np.uint64(0)
    store64(target, (load64(target) & ~mask) | (np.uint64(value) & mask))
