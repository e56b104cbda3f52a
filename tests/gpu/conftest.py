"""Devices to test on, and Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch as th

if not th.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

DEVICES = ["cpu", *(["cuda"] if th.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True, scope="session")
def _faster_interpreter() -> None:
    """The interpreter calls Python for each element of a running maximum; NumPy has one."""
    if th.cuda.is_available():
        return
    try:
        from triton.runtime.interpreter import ScanOps
    except ImportError:
        return
    slow = ScanOps.generic_scan

    def scan(self: Any, inputs: Any) -> Any:
        if self.combine_fn.__name__ != "_larger":
            return slow(self, inputs)
        values = np.maximum.accumulate(inputs[0].handle.data, axis=self.axis)
        return [self.to_tensor(values, inputs[0].dtype)]

    ScanOps.generic_scan = scan
