"""Access to memory by address, in vectors of up to 64 bytes. Import through kernel modules only.

numba checks the bounds and the overlap of arrays in every loop that copies bytes, which costs more than copying some
bytes. These functions check nothing: their callers make sure that all bytes that are read and written exist. They are
LLVM's own vector operations, so every processor has its form of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_BYTE, _LANE_INDEX, _INTEGER = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FALSE = ir.Constant(ir.IntType(1), 0)

VECTOR_BYTES = 64
"""No function here reads or writes further than this beyond the bytes that it is asked for."""


def _load(builder: Any, address: Any, kind: Any) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1


def _loading(n_bits: int) -> Any:
    def load(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = _load(builder, arguments[0], ir.IntType(n_bits))
            return value if n_bits == 64 else builder.zext(value, _INTEGER)

        return (types.uint64 if n_bits == 64 else types.int64)(types.intp), generate

    return intrinsic(load)


def _storing(n_bits: int) -> Any:
    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = arguments[1] if n_bits == 64 else builder.trunc(arguments[1], ir.IntType(n_bits))
            _store(builder, value, arguments[0])
            return context.get_dummy_value()

        return types.void(types.intp, types.uint64 if n_bits == 64 else types.int64), generate

    return intrinsic(store)


def _copying(n_bytes: int) -> Any:
    def copy(typing_context: Any, target: Any, source: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _store(builder, _load(builder, arguments[1], ir.VectorType(_BYTE, n_bytes)), arguments[0])
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), generate

    return intrinsic(copy)


def _first_bytes(n_bytes: int, make_source: Callable[[Any, Any, Any], Any]) -> Any:
    """``store(target, source, count)``: write the first ``count`` bytes of a vector. The others keep their values."""

    def store(typing_context: Any, target: Any, source: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            vector = ir.VectorType(_BYTE, n_bytes)
            before = _load(builder, arguments[0], vector)
            positions = ir.Constant(vector, list(range(n_bytes)))
            chosen = builder.icmp_unsigned("<", positions, _repeated(builder, arguments[2], vector))
            _store(builder, builder.select(chosen, make_source(builder, arguments[1], vector), before), arguments[0])
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp), generate

    return intrinsic(store)


def _repeated(builder: Any, value: Any, vector: Any) -> Any:
    """A vector of which each byte is the lowest byte of ``value``."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = ir.Constant(_LANE_INDEX, 0)
    everywhere = ir.Constant(ir.VectorType(_LANE_INDEX, vector.count), [0] * vector.count)
    filled = builder.insert_element(undefined, builder.trunc(value, _BYTE), first)
    return builder.shuffle_vector(filled, undefined, everywhere)


def _equal_bytes(typing_context: Any, first: Any, second: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = [_load(builder, address, ir.VectorType(_BYTE, 64)) for address in arguments]
        return builder.bitcast(builder.icmp_unsigned("==", *values), _INTEGER)

    return types.uint64(types.intp, types.intp), generate


def _counting(operation: str) -> Any:
    def count(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return getattr(builder, operation)(arguments[0], _FALSE)

        return types.int64(types.uint64), generate

    return intrinsic(count)


load8, load16, load64 = _loading(8), _loading(16), _loading(64)
"""``load(address)``: an unsigned number of so many bits."""
store8, store16, store64 = _storing(8), _storing(16), _storing(64)
"""``store(address, value)``."""
copy16, copy32, copy64 = _copying(16), _copying(32), _copying(64)
"""``copy(target, source)``: so many bytes."""
copy_first16 = _first_bytes(16, _load)
copy_first32 = _first_bytes(32, _load)
"""``copy(target, source, count)``: up to 32 bytes."""
fill_first32 = _first_bytes(32, _repeated)
"""``fill(target, byte, count)``: up to 32 bytes."""
equal_bytes: Any = intrinsic(_equal_bytes)
"""``equal_bytes(first, second)``: bit ``i`` says whether the bytes ``i`` of two blocks of 64 bytes are equal."""
trailing_zeros, leading_zeros = _counting("cttz"), _counting("ctlz")
"""The number of zero bits below the lowest one, or above the highest one; 64 for zero."""


@njit(nogil=True, cache=True)
def address(array: npt.NDArray[Any]) -> int:
    return np.intp(array.ctypes.data)  # numba would turn sums of it and signed numbers into floats


@njit(nogil=True, cache=True)
def copy_padded(target: int, source: int, size: int) -> None:
    """Copy ``size`` bytes, and up to 64 after them."""
    for at in range(0, size, 64):
        copy64(target + at, source + at)


@njit(nogil=True, cache=True)
def copy(target: int, source: int, size: int) -> None:
    """Copy ``size`` bytes. If the two overlap, ``source`` is at least 32 bytes before ``target``.

    Bytes up to 32 after the last one are read, and written with the values that they have.
    """
    while size > 32:
        copy32(target, source)
        target, source, size = target + 32, source + 32, size - 32
    copy_first32(target, source, size)


@njit(nogil=True, cache=True)
def repeat(target: int, distance: int, size: int) -> None:
    """Write ``size`` bytes, each a copy of the one ``distance`` before it. ``distance`` is from 1 to 31."""
    if distance == 1:
        byte = load8(target - 1)
        while size > 32:
            fill_first32(target, byte, 32)
            target, size = target + 32, size - 32
        fill_first32(target, byte, size)
        return
    if size > 64:  # after some repetitions, longer steps are possible
        longer = distance
        while longer < 32:
            longer += distance
        _repeat_slowly(target, distance, longer - distance)
        copy(target + longer - distance, target - distance, size - (longer - distance))
    else:
        _repeat_slowly(target, distance, size)


@njit(nogil=True, cache=True)
def _repeat_slowly(target: int, distance: int, size: int) -> None:
    if distance >= 8:
        while size > 8:
            store64(target, load64(target - distance))
            target, size = target + 8, size - 8
        _store_first(target, load64(target - distance), size)
        return
    n_bits = np.uint64(8 * distance)
    pattern = load64(target - distance) & ((np.uint64(1) << n_bits) - np.uint64(1))
    pattern |= pattern << n_bits
    if distance < 4:
        pattern |= pattern << (n_bits + n_bits)
        if distance == 2:
            pattern |= pattern << np.uint64(32)
    step = 8 - 8 % distance  # whole repetitions
    while size > step:
        _store_first(target, pattern, step)
        target, size = target + step, size - step
    _store_first(target, pattern, size)


@njit(nogil=True, cache=True)
def _store_first(target: int, value: int, count: int) -> None:
    """Write the lowest ``count`` bytes of ``value``."""
    mask = ~np.uint64(0) >> np.uint64(64 - 8 * count) if count > 0 else np.uint64(0)
    store64(target, (load64(target) & ~mask) | (np.uint64(value) & mask))
