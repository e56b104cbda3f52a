"""Triton kernels: one operation per file, each with the function that launches it.

Kernels have no way to raise errors, so they trust what they read. The NumPy codecs define the bytes of records; tests
compare the kernels with them, on machines without a GPU in Triton's interpreter.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch as th

OLDEST_TRITON = (3, 3)
"""Earlier versions do not take constants by position when a compiled kernel is launched again."""
_LARGE = 1 << 17
LENGTH_BITS = 32
"""The second number of a record's index entry is its length, and above these bits its reference."""


class DeviceFrames(NamedTuple):
    """What a device knows of the frames of a :class:`~sb3_extra_buffers.gpu_buffers.frame_store.DeviceFrameStore`."""

    heap: th.Tensor
    """``uint8``: the bytes of the records."""
    records: th.Tensor
    """``int64``, (lanes, capacity, 2): where each record starts; its length and reference."""
    table: th.Tensor
    """``int32``, (references, words): the reference frames. Without rows for methods that have none."""
    ring: th.Tensor
    """``uint8``, (lanes, frames, frame_bytes): the newest frames. Frame *i* is at position *i* modulo their number."""
    headers: th.Tensor
    """``int32``, (lanes, frames): the header of each frame in the ring that was measured for a ``delta`` record."""
    heads: th.Tensor
    """``int64``, (lanes,): the number of the next frame."""
    known: th.Tensor
    """``int32``, (lanes,): whether an observation ends at the head, so that the next may share frames with it."""
    encoded: th.Tensor
    """``int64``, (lanes,): the first frame of each lane that is not in a record."""
    group: int
    """Frames in a record."""
    stack: int
    """Frames in an observation."""

    @property
    def ring_frames(self) -> int:
        """Frames that the ring holds in each lane."""
        return self.ring.shape[1]

    @property
    def frame_bytes(self) -> int:
        return self.ring.shape[2]


class FieldBatch(NamedTuple):
    """Fields to be gathered by the launch that rebuilds observations. Everything is seen as words of 4 bytes."""

    fields: th.Tensor
    """``int32``, (slots, words in a row)."""
    actions: th.Tensor
    rewards: th.Tensor
    dones: th.Tensor
    constants: tuple[int, ...]
    """Words in a row; words in an action, and the next power of two; where actions, rewards, dones, timeouts begin."""


class ObservationBatch(NamedTuple):
    """Observations of one or two columns, and the tensors that they go to."""

    places: th.Tensor
    """``int64``: the slots for each column, and the environments."""
    ends: list[th.Tensor]
    """For each column, ``int32`` (slots, environments): the frame after an observation's last one."""
    outs: Sequence[th.Tensor]
    """For each column, ``uint8``, (n, bytes of an observation)."""
    fields: FieldBatch | None = None


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed, and new enough for :class:`Launcher`."""
    if importlib.util.find_spec("triton") is None:
        return False
    version = importlib.import_module("triton").__version__
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    return numbers >= list(OLDEST_TRITON)


def uses_triton(device: th.device) -> bool:
    """Whether kernels run on ``device``: on CUDA, or on the CPU in Triton's interpreter, which is for tests."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    return device.type in ("cpu", "cuda") and has_triton()


@functools.cache
def kernel_module(name: str) -> Any:
    """A module of this package, none of which can be imported without Triton."""
    return importlib.import_module(f"{__name__}.{name}")


def block_size(n_elements: int, usual: int = 2048) -> int:
    """How many elements a program handles at a time: a power of two, more of them where there are very many."""
    return min(1 << (n_elements - 1).bit_length(), usual if n_elements < _LARGE else 8192)


@functools.cache
def _several_gpus() -> bool:
    return th.cuda.device_count() > 1


@functools.cache
def _knobs() -> Any:
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
        elif _runs_directly() and _knobs().runtime.launch_enter_hook is None:
            stream = th._C._cuda_getCurrentRawStream(device.index)
            compiled.run(
                *grid, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments
            )  # fmt: skip
        else:
            compiled[(*grid, 1)](*arguments)
