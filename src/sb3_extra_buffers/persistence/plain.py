"""Values as JSON, without loss and without pickle.

What JSON has no word for becomes a dict with one key that begins with ``$``: ``{"$dtype": "<f4"}``. A dict of the
user's whose keys could be mistaken for that is written as pairs, ``{"$dict": [[key, value], ...]}``.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from stable_baselines3.her.goal_selection_strategy import GoalSelectionStrategy

from sb3_extra_buffers.errors import CorruptDataError, SaveError

_LARGEST_BOX = 1 << 26
_DTYPE = re.compile(r"[<>|=][biufcSU][0-9]{1,9}")


def encode(value: Any, where: str) -> Any:
    """``value`` as something that JSON can hold. ``where`` is what an error calls it."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, GoalSelectionStrategy):
        return {"$goals": value.name}
    if isinstance(value, np.generic | np.ndarray):
        return _encode_array(np.asarray(value), isinstance(value, np.generic), where)
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, list):
        return [encode(item, where) for item in value]
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, where) for item in value]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, spaces.Space):  # of which Dict is a Mapping as well
        return {"$space": _encode_space(value, where)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where)
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return {"$dtype": np.dtype(value).str}
    if type(value).__name__ == "_Beta":
        return encode(value.value, where)
    if isinstance(value, FloatSchedule):
        return encode(value.value_schedule, where)
    if isinstance(value, ConstantSchedule):
        return encode(value.val, where)
    if isinstance(value, LinearSchedule):
        return {"$linear": [encode(part, where) for part in (value.start, value.end, value.end_fraction)]}
    raise SaveError(
        f"{where} is of type {type(value).__name__}, which only pickle could save, and this file format has none: "
        "pickle from a stranger runs code. Numbers, strings, arrays, and lists and dicts of them can be saved. "
        "SB3's way, model.save_replay_buffer(), saves anything."
    )


def decode(value: Any) -> Any:
    """The inverse. What :func:`encode` cannot have written is a :class:`CorruptDataError`."""
    try:
        return _decode(value)
    except RecursionError:
        raise CorruptDataError("A value in the file makes no sense: it is nested too deep.") from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, AssertionError, MemoryError) as error:
        raise CorruptDataError(f"A value in the file makes no sense: {error}.") from error


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: _decode(item) for key, item in value.items()}
    ((kind, content),) = value.items()
    return _DECODERS[kind](content)


def _encode_array(array: np.ndarray[Any, Any], is_scalar: bool, where: str) -> Any:
    if not _DTYPE.fullmatch(array.dtype.str):
        raise SaveError(f"{where} has an array of dtype {array.dtype}, which only pickle could save.")
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"$scalar" if is_scalar else "$array": [array.dtype.str, list(array.shape), data]}


def _decode_array(content: Any) -> np.ndarray[Any, Any]:
    dtype, shape, data = content
    return np.frombuffer(base64.b64decode(data), dtype=_decode_dtype(dtype)).reshape(shape).copy()


def _decode_dtype(text: Any) -> np.dtype[Any]:
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise ValueError(f"no dtype: {text!r}")
    return np.dtype(text)


def _encode_mapping(value: Mapping[Any, Any], where: str) -> Any:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    return {"$dict": [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]}


def _encode_space(space: Any, where: str) -> Any:
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
    """A single number where all are the same."""
    first = bound.reshape(-1)[:1]
    return encode(first if bound.size and (bound == first).all() else bound, where)


def _decode_space(content: Any) -> Any:
    kind, *details = content
    if kind == "Box":
        low, high, shape, dtype = details
        if math.prod(shape) > _LARGEST_BOX:
            raise ValueError(f"observations of shape {shape}")
        low, high = (np.broadcast_to(bound, shape) if bound.size == 1 else bound for bound in map(_decode, (low, high)))
        return spaces.Box(low, high, tuple(shape), _decode_dtype(dtype).type)
    if kind == "Discrete":
        n, start, dtype = details
        return spaces.Discrete(n, start=start, **_integer_dtype(dtype))
    if kind == "MultiDiscrete":
        nvec, start = map(_decode, details)
        return spaces.MultiDiscrete(nvec, dtype=nvec.dtype.type, start=start)
    if kind == "MultiBinary":
        shape, is_flat = details
        return spaces.MultiBinary(shape[0] if is_flat else shape)
    if kind == "Dict":
        return spaces.Dict({key: _decode_space(part) for key, part in details[0]})
    if kind == "Tuple":
        return spaces.Tuple([_decode_space(part) for part in details[0]])
    raise ValueError(f"no space: {kind!r}")


def _integer_dtype(text: Any) -> dict[str, Any]:
    """For ``Discrete``, whose dtype was always int64 in older versions of Gymnasium."""
    dtype = _decode_dtype(text)
    return {} if dtype == np.int64 else {"dtype": dtype.type}


_DECODERS: dict[str, Any] = {
    "$float": float,
    "$tuple": lambda content: tuple(_decode(item) for item in content),
    "$bytes": base64.b64decode,
    "$dict": lambda content: {_decode(key): _decode(item) for key, item in content},
    "$dtype": _decode_dtype,
    "$array": _decode_array,
    "$scalar": lambda content: _decode_array(content)[()],
    "$space": _decode_space,
    "$goals": GoalSelectionStrategy.__getitem__,
    "$linear": lambda content: LinearSchedule(*map(_decode, content)),
}
