"""The values of a step, checked before they are stored, so that storing them cannot fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

SINGLE = ""
"""The key of the only store where the observation space is not a Dict."""


def part_of(observations: Any, key: str) -> Any:
    """The observations of one store."""
    return observations if key == SINGLE else observations[key]


def row_of(array: npt.NDArray[Any], values: Any) -> npt.NDArray[Any]:
    """``values`` as a row of ``array``, in all the forms that SB3 takes, or the error that SB3 would raise."""
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
    return values.detach().cpu().numpy() if isinstance(values, th.Tensor) else values
