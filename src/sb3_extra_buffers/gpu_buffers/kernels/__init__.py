"""Batches rebuilt on the device, one operation a file.

Each has a version in plain torch operations, ``*_torch``, which defines what it does and runs everywhere, and one in
Triton, for CUDA.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re

import torch as th

OLDEST_TRITON = (3, 3)
"""Earlier versions do not take constants by position when a compiled kernel is launched again."""


@functools.cache
def has_triton() -> bool:
    """Whether the package that compiles the kernels for CUDA is installed, and new enough for :mod:`.launching`."""
    if importlib.util.find_spec("triton") is None:
        return False
    version = importlib.import_module("triton").__version__
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    return numbers >= list(OLDEST_TRITON)


def uses_triton(device: th.device) -> bool:
    return device.type == "cuda" and has_triton()
