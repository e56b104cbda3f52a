"""What numba lacks: memory and C functions by their address, and counters that threads share.

Addresses are plain integers, so that kernels that use them can be kept in numba's cache, which kernels that refer to
``ctypes`` objects cannot.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_INT = ir.IntType(64)


def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), generate


def _call(typing_context: Any, address: Any, arguments: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        n = signature.args[1].count
        passed = [builder.extract_value(values[1], i) for i in range(n)]
        function = builder.inttoptr(values[0], ir.FunctionType(_INT, [_INT] * n).as_pointer())
        return builder.call(function, passed)

    integers = types.UniTuple(types.intp, len(arguments))  # type: ignore[no-untyped-call]
    return types.intp(types.intp, integers), generate


def _fetch_and_add(typing_context: Any, address: Any, amount: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _INT.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "monotonic")

    return types.intp(types.intp, types.intp), generate


pointer: Any = intrinsic(_pointer)
"""``pointer(address)``, for ``numba.carray``."""

call: Any = intrinsic(_call)
"""``call(address, arguments)``: the integer that a C function returns for a tuple of integers or pointers."""

fetch_and_add: Any = intrinsic(_fetch_and_add)
"""``fetch_and_add(address, amount)``: add to an integer that threads share, and return what was there before."""
