"""Launching kernels at little cost."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch as th

_LARGE = 1 << 17


def block_size(n_elements: int, usual: int = 2048) -> int:
    """How many elements a program handles at a time: a power of two, more of them where there are very many."""
    return min(1 << (n_elements - 1).bit_length(), usual if n_elements < _LARGE else 8192)


@functools.cache
def _several_gpus() -> bool:
    return th.cuda.device_count() > 1


@functools.cache
def knobs() -> Any:
    return importlib.import_module("triton").knobs


@functools.cache
def _runs_directly() -> bool:
    """Whether compiled kernels are known to take their arguments as :class:`Launcher` gives them, past what Triton does
    for profilers."""
    version: str = importlib.import_module("triton").__version__
    return version.startswith(("3.6.", "3.7."))


class Launcher:
    """Calls a Triton kernel. Triton looks at every argument of every call, which takes longer than the kernel.

    So a compiled kernel is used again for calls of the same ``key``, which must tell apart calls with other constants
    or types. Numbers must not be specialized on, and tensors must be as torch allocates them, or rows of
    such: Triton takes for granted that they are aligned.
    """

    def __init__(self, function: Any, n_warps: int) -> None:
        self.function = function
        self.n_warps = n_warps
        self._compiled: dict[Any, Any] = {}

    def __call__(self, device: th.device, grid: tuple[int, int], key: Any, *arguments: Any) -> None:
        if _several_gpus() and device.type == "cuda" and device.index != th.cuda.current_device():
            with th.cuda.device(device):
                self(device, grid, key, *arguments)
            return
        compiled = self._compiled.get((device.index, key))
        if compiled is None:
            # Nothing is returned by Triton's interpreter.
            compiled = self.function[grid](*arguments, num_warps=self.n_warps)
            if compiled is not None:
                self._compiled[device.index, key] = compiled
        elif _runs_directly() and knobs().runtime.launch_enter_hook is None:
            stream = th._C._cuda_getCurrentRawStream(device.index)
            compiled.run(
                *grid, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments
            )  # fmt: skip
        else:
            compiled[(*grid, 1)](*arguments)
