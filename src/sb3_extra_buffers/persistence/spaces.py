"""Convert Gymnasium's spaces to JSON and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from sb3_extra_buffers.errors import SaveError
from sb3_extra_buffers.state import DECODERS, ENCODERS, decode_dtype, encode

_LARGEST_BOX = 1 << 26
"""The largest number of elements of an observation in an untrusted file."""


def _encode_space(space: Any, where: str) -> list[Any]:
    kind = type(space)
    if kind is spaces.Box:
        bounds = [_encode_bound(bound, where) for bound in (space.low, space.high)]
        return ["Box", *bounds, list(space.shape), space.dtype.str]
    if kind is spaces.Discrete:
        return ["Discrete", int(space.n), int(space.start), space.dtype.str]
    if kind is spaces.MultiDiscrete:
        return ["MultiDiscrete", encode(space.nvec, where), encode(space.start, where)]
    if kind is spaces.MultiBinary:
        return ["MultiBinary", list(space.shape), isinstance(space.n, int)]
    if kind is spaces.Dict:
        return ["Dict", [[key, _encode_space(part, where)] for key, part in space.spaces.items()]]
    if kind is spaces.Tuple:
        return ["Tuple", [_encode_space(part, where) for part in space.spaces]]
    raise SaveError(f"{where} is a space of type {kind.__name__}, which cannot be saved.")


def _encode_bound(bound: np.ndarray[Any, Any], where: str) -> Any:
    """Encode the bound of a Box, as a single number if all its elements are equal."""
    first = bound.reshape(-1)[:1]
    return encode(first if bound.size and (bound == first).all() else bound, where)


def _decode_space(content: Any) -> Any:
    kind, *details = content
    if kind == "Box":
        low, high, shape, dtype = details
        if math.prod(shape) > _LARGEST_BOX:
            raise ValueError(f"observations of shape {shape}")
        low, high = (np.broadcast_to(bound.reshape(()), shape) if bound.size == 1 else bound for bound in (low, high))
        return spaces.Box(low, high, tuple(shape), decode_dtype(dtype).type)
    if kind == "Discrete":
        n, start, dtype = details
        # Older versions of Gymnasium have no argument ``dtype``: it was always int64.
        integers: dict[str, Any] = {} if decode_dtype(dtype) == np.int64 else {"dtype": decode_dtype(dtype).type}
        return spaces.Discrete(n, start=start, **integers)
    if kind == "MultiDiscrete":
        nvec, start = details
        return spaces.MultiDiscrete(nvec, dtype=nvec.dtype.type, start=start)
    if kind == "MultiBinary":
        shape, is_flat = details
        return spaces.MultiBinary(shape[0] if is_flat else shape)
    if kind == "Dict":
        return spaces.Dict({key: _decode_space(part) for key, part in details[0]})
    if kind == "Tuple":
        return spaces.Tuple([_decode_space(part) for part in details[0]])
    raise ValueError(f"not a space: {kind!r}")


ENCODERS[spaces.Space] = lambda space, where: {"$space": _encode_space(space, where)}
DECODERS["$space"] = _decode_space
