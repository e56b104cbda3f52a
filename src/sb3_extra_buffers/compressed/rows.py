"""Checks of the values of a step before they are stored, and helpers for observations of Dict spaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

SINGLE = ""
"""The key of the only store where the observation space is not a Dict."""


def part_of(observations: Any, key: str) -> Any:
    """The observations of one store."""
    return observations if key == SINGLE else observations[key]


def map_parts(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Apply ``function`` to observations; if they are dicts, to the observations of each key."""
    if isinstance(first, dict):
        return {key: function(part, *(other[key] for other in others)) for key, part in first.items()}
    return function(first, *others)


def parts_at(observations: Any, key: Any) -> Any:
    """The items of arrays, or of a dict of arrays, that ``key`` selects."""
    return map_parts(lambda array: array[key], observations)


def row_of(array: npt.NDArray[Any], values: Any) -> npt.NDArray[Any]:
    """``values`` as a row of ``array``. Accepts every form that SB3 accepts, and raises the errors that SB3 raises."""
    if type(values) is np.ndarray and values.shape == array.shape[1:]:
        dtype = values.dtype
        if dtype is array.dtype or dtype.kind == "b":
            return values  # assigning it cannot fail
    row = np.asarray(values, dtype=array.dtype)
    if row.shape != array.shape[1:]:
        given, row = row, np.empty(array.shape[1:], dtype=array.dtype)
        row[...] = given
    return row


def on_host(values: Any) -> Any:
    """A tensor of any device as an array; other values unchanged."""
    if not isinstance(values, th.Tensor):
        return values
    if values.dtype == th.bfloat16:  # as under autocast. NumPy does not have it, but float32 holds the same values.
        values = values.float()
    return values.detach().cpu().numpy()
