"""Check the values of a step before they are stored, and handle observations of Dict spaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

SINGLE = ""
"""The key of the only store if the observation space is not a Dict."""


def part_of(observations: Any, key: str) -> Any:
    """The observations of one store."""
    return observations if key == SINGLE else observations[key]


def map_parts(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Apply ``function`` to observations, or to those of each key if they are dicts."""
    if isinstance(first, dict):
        return {key: function(part, *(other[key] for other in others)) for key, part in first.items()}
    return function(first, *others)


def parts_at(observations: Any, key: Any) -> Any:
    """Index an array, or each array of a dict, by ``key``."""
    return map_parts(lambda array: array[key], observations)


def row_of(array: npt.NDArray[Any], values: Any) -> npt.NDArray[Any]:
    """Convert ``values`` to a row of ``array``. Accepts and refuses the same values as SB3, with the same errors."""
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
    """Convert a tensor on any device to an array. Return other values unchanged."""
    if not isinstance(values, th.Tensor):
        return values
    if values.dtype == th.bfloat16:  # from autocast. NumPy lacks it, but float32 holds the same values.
        values = values.float()
    return values.detach().cpu().numpy()
