"""The storage options that a user passes to a buffer, checked once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Codec, FrameSpec
from sb3_extra_buffers.codecs.registry import Method, create_codec, parse_method
from sb3_extra_buffers.errors import ConfigurationError, ObservationError
from sb3_extra_buffers.state import SavedState, State, decode, encode
from sb3_extra_buffers.storage.stacking import MAX_STACK

FrameStack = int | Literal["auto"] | None
Preference = Literal["speed", "balanced", "memory"]


@dataclass(frozen=True)
class CodecRecipe:
    """A method with its options: all that is needed to create a codec for frames of any kind."""

    method: Method
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, frame: FrameSpec) -> Codec:
        return create_codec(self.method, frame, **self.options)

    def state(self) -> State:
        """For :mod:`sb3_extra_buffers.persistence`."""
        return {"method": str(self.method), "options": encode(self.options, "compression_kwargs")}

    @classmethod
    def restored(cls, state: SavedState) -> CodecRecipe:
        """The recipe whose :meth:`state` this is."""
        options = decode(state.value("options"))
        if not isinstance(options, dict):
            raise state.error("options", f"must be names and values, not {options!r}")
        return cls(parse_method(state.value("method")), options)

    def without(self, option: str) -> CodecRecipe:
        return CodecRecipe(self.method, {name: value for name, value in self.options.items() if name != option})


@dataclass(frozen=True)
class StorageConfig:
    """How to store observations."""

    recipe: CodecRecipe | None
    """``None`` means ``auto``."""
    elem_type: np.dtype[Any] | None = None
    """The dtype to store observations in; ``None`` means their own, which is lossless."""
    frame_stack: FrameStack = "auto"
    prefer: Preference = "balanced"
    """What ``auto`` optimizes for."""

    @classmethod
    def from_arguments(
        cls,
        compression_method: str,
        dtypes: Mapping[str, Any] | npt.DTypeLike | None,
        compression_kwargs: Mapping[str, Any] | None,
        decompression_kwargs: Mapping[str, Any] | None,
        frame_stack: FrameStack,
        prefer: Preference = "balanced",
    ) -> StorageConfig:
        """Check the arguments of a buffer. The caller's objects are neither kept nor changed."""
        if dtypes is not None and not isinstance(dtypes, Mapping):
            dtypes = {"elem_type": dtypes}
        dtypes = dict(dtypes or {})
        unknown = set(dtypes) - {"elem_type", "runs_type"}
        if unknown:
            raise ConfigurationError(f"dtypes takes 'elem_type' and 'runs_type', not {sorted(map(str, unknown))}.")
        if prefer not in get_args(Preference):
            raise ConfigurationError(f"prefer must be 'speed', 'balanced' or 'memory', not {prefer!r}.")
        method = parse_method(compression_method)
        options = {**(compression_kwargs or {}), **(decompression_kwargs or {})}
        # Version 0.5 accepted dtypes among the codec's options, too, and a number of threads for zstd.
        dtypes |= {name: options.pop(name) for name in ("elem_type", "runs_type") if name in options}
        if method.name == "zstd":
            options.pop("threads", None)
        if method.name == "auto" and options:
            raise ConfigurationError(
                f"compression_method='auto' takes no options, but got {sorted(options)}. "
                "Name a method to pass options to it."
            )
        if method.name.startswith("rle") and dtypes.get("runs_type") is not None:
            options.setdefault("runs_type", _number_type("runs_type", dtypes["runs_type"]))
        return cls(
            None if method.name == "auto" else CodecRecipe(method, options),
            None if dtypes.get("elem_type") is None else _number_type("elem_type", dtypes["elem_type"]),
            _stack(frame_stack),
            prefer,
        )

    def stored_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype in which values of ``dtype`` are stored. Warns if that is lossy."""
        if self.elem_type is None:
            return dtype
        if not np.can_cast(dtype, self.elem_type, "safe"):
            warnings.warn(
                f"Observations of dtype {dtype} are stored as {self.elem_type}: values outside its range saturate and "
                "fractions may be lost. Leave elem_type out of dtypes to store them without loss.",
                UserWarning,
                stacklevel=2,
            )
        return self.elem_type


def _stack(given: Any) -> FrameStack:
    if given is None or given == "auto":
        return given  # type: ignore[no-any-return]
    if not isinstance(given, int | np.integer) or not 1 <= given <= MAX_STACK:
        raise ConfigurationError(f"frame_stack must be from 1 to {MAX_STACK}, 'auto' or None, not {given!r}.")
    return int(given)


def _number_type(name: str, given: npt.DTypeLike) -> np.dtype[Any]:
    try:
        dtype = np.dtype(given)
    except TypeError as error:
        raise ConfigurationError(f"{name} must be a dtype, not {given!r}.") from error
    if dtype.kind not in "biuf":
        raise ConfigurationError(f"{name} must be a dtype of numbers, not {dtype}.")
    return dtype


def saturate(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Cast to ``dtype``. Values outside its range become its limits, and NaN becomes 0 in integers."""
    if values.dtype == dtype:
        return values
    if dtype.kind == "b":
        return values.astype(bool)
    if dtype.kind == "f":
        largest = np.finfo(dtype).max
        finite = np.isfinite(values)
        return np.where(finite, np.clip(values, -largest, largest), values).astype(dtype)
    bounds = np.iinfo(dtype)
    if values.dtype.kind == "f":
        values = np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf)
        high = values.dtype.type(bounds.max)
        if int(high) > bounds.max:  # the largest int64 is not a float64: it was rounded up, and would overflow
            high = np.nextafter(high, values.dtype.type(0))
        limits = (values.dtype.type(bounds.min), high)
    else:
        own = np.iinfo(values.dtype) if values.dtype.kind in "iu" else bounds
        limits = (max(bounds.min, own.min), min(bounds.max, own.max))
    return np.asarray(np.clip(values, *limits)).astype(dtype)


def cast(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Cast observations to the dtype of their space.

    As in SB3, casts within a kind, such as float64 to float32, may round. Other casts must not change any value.
    """
    if np.can_cast(array.dtype, dtype, "same_kind"):
        return array.astype(dtype)
    if array.dtype.kind in "biuf":
        with np.errstate(invalid="ignore"):
            result = array.astype(dtype)
        if np.array_equal(result, array):
            return result
    raise ObservationError(
        f"Observations of dtype {array.dtype} do not fit a space of dtype {dtype}: storing them would change values. "
        "Give the observation space the dtype that the environment returns."
    )
