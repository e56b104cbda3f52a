"""Batches rebuilt on the device, one operation a file.

Each has a version in plain torch operations, ``*_torch``, which defines what it does and runs everywhere, and one in
Triton, for CUDA.
"""

from __future__ import annotations

import functools
import importlib.util

import torch as th


@functools.cache
def has_triton() -> bool:
    """Whether the package that compiles the kernels for CUDA is installed."""
    return importlib.util.find_spec("triton") is not None


def uses_triton(device: th.device) -> bool:
    return device.type == "cuda" and has_triton()
