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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch as th

from sb3_extra_buffers.gpu_buffers.driver import Kernel
from sb3_extra_buffers.gpu_buffers.transfer import Places, has_several_gpus

OLDEST_TRITON = (3, 3)
"""Earlier versions do not take constants by position when a compiled kernel is launched again."""
_LARGE = 1 << 17
REPORT_HEADER = 5
"""Numbers in a report before the lengths."""
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
    references: th.Tensor
    """``int64``, (lanes,): which reference frame the next records of each lane refer to."""
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
    report: th.Tensor
    """``int64``, (lanes, 5 + records): what the device measures for the host. For each lane its head, how many words
    fewer a record would have with a newer reference, where its oldest observation ends, the first frame that is not in
    a record, its reference, and the lengths of its next records. There are as many as it has complete ones."""
    orders: th.Tensor
    """``int64``, (2 + lanes,): what the host decides. Where in the heap to write the records that were measured, how
    many of each lane at most, and for each lane the number of a new reference, or 0."""
    group: int
    """Frames in a record."""
    stack: int
    """Frames in an observation."""

    @classmethod
    def zeros(
        cls, n_lanes: int, ring_frames: int, frame_bytes: int, group: int, stack: int, device: th.device
    ) -> DeviceFrames:
        """No frames, and no room for records and references."""

        def zeros(*shape: int, dtype: th.dtype = th.int64) -> th.Tensor:
            return th.zeros(shape, dtype=dtype, device=device)

        return cls(
            heap=zeros(0, dtype=th.uint8),
            records=zeros(n_lanes, 0, 2),
            table=zeros(0, -(-frame_bytes // 4), dtype=th.int32),
            references=zeros(n_lanes),
            ring=zeros(n_lanes, ring_frames, frame_bytes, dtype=th.uint8),
            headers=zeros(n_lanes, ring_frames, dtype=th.int32),
            heads=zeros(n_lanes),
            known=zeros(n_lanes, dtype=th.int32),
            encoded=zeros(n_lanes),
            report=zeros(n_lanes, REPORT_HEADER + ring_frames // group),
            orders=zeros(2 + n_lanes),
            group=group,
            stack=stack,
        )

    @property
    def ring_frames(self) -> int:
        """Frames that the ring holds in each lane."""
        return self.ring.shape[1]

    @property
    def frame_bytes(self) -> int:
        return self.ring.shape[2]


class FieldRow(NamedTuple):
    """The fields of a slot, which are written by the launch that appends its observations."""

    row: th.Tensor
    """``int32``, in pinned memory of the host."""
    fields: th.Tensor
    """``int32``, (slots, words in a row)."""
    slot: int


class FieldBatch(NamedTuple):
    """Fields to be gathered by the launch that rebuilds observations. Everything is seen as words of 4 bytes."""

    fields: th.Tensor
    """``int32``, (slots, words in a row)."""
    actions: th.Tensor
    rewards: th.Tensor
    dones: th.Tensor
    constants: tuple[int, ...]
    """Words in a row; words in an action, and the next power of two; where actions, rewards, dones, timeouts begin."""


def no_fields(anything: th.Tensor) -> FieldBatch:
    """What kernels get without fields: some tensor in place of each, which they leave alone."""
    return FieldBatch(anything, anything, anything, anything, (0,) * 7)


class ObservationBatch(NamedTuple):
    """Observations of one or two columns, and the tensors that they go to."""

    places: Places
    ends: list[th.Tensor]
    """For each column, ``int32`` (slots, environments): the frame after an observation's last one."""
    outs: Sequence[th.Tensor]
    """For each column, ``uint8``, with the bytes of ``len(places)`` observations."""
    fields: FieldBatch | None = None

    @property
    def outputs(self) -> tuple[th.Tensor, ...]:
        """What kernels write to: two tensors for observations and three for fields, even if not all are needed."""
        first = self.outs[0]
        return (first, self.outs[-1], *((first, first, first) if self.fields is None else self.fields[1:4]))


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed, and new enough for :class:`Launcher`."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        version = importlib.import_module("triton").__version__
    except ImportError:  # early versions need setuptools, but do not ask for it
        return False
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
def _runtime() -> Any:
    """Triton's settings, if compiled kernels are known to take their arguments as :class:`Kernel` gives them."""
    triton = importlib.import_module("triton")
    return triton.knobs.runtime if triton.__version__.startswith(("3.6.", "3.7.")) else None


def _profiler_is_on() -> bool:
    """Whether somebody wants to be told of every launch."""
    return bool(_runtime().launch_enter_hook.calls)


class Launcher:
    """Calls a Triton kernel. Triton inspects every argument of every call, which takes longer than the kernel.

    So a compiled kernel is used again for calls with the same ``constants``, and gets the addresses of its tensors.
    Numbers must not be specialized on. Tensors must be as torch allocates them, or rows of such: Triton takes for
    granted that they are aligned.
    """

    def __init__(self, function: Any, n_warps: int) -> None:
        self.function = function
        self.n_warps = n_warps
        self._compiled: dict[Any, tuple[Any, Kernel | None]] = {}

    def __call__(
        self,
        device: th.device,
        grid: tuple[int, int],
        tensors: Sequence[th.Tensor],
        numbers: tuple[int, ...],
        constants: tuple[Any, ...],
    ) -> None:
        """
        :param constants: The last arguments of the kernel, for which it is compiled. Calls with other dtypes of tensors
            must have other constants as well.
        """
        if has_several_gpus() and device.type == "cuda" and device.index != th.cuda.current_device():
            with th.cuda.device(device):
                self(device, grid, tensors, numbers, constants)
            return
        found = self._compiled.get((device.index, constants))
        if found is None:
            # Nothing is returned by Triton's interpreter.
            compiled = self.function[grid](*tensors, *numbers, *constants, num_warps=self.n_warps)
            if compiled is not None:
                is_simple = _runtime() is not None and Kernel.can_launch(compiled)
                kernel = Kernel(compiled, len(tensors), len(numbers)) if is_simple else None
                self._compiled[device.index, constants] = compiled, kernel
            return
        compiled, kernel = found
        if kernel is not None and not _profiler_is_on():
            kernel.launch(grid, th._C._cuda_getCurrentRawStream(device.index), tensors, numbers)
        else:
            compiled[(*grid, 1)](*tensors, *numbers, *constants)

    def kernel(self, device: th.device, constants: tuple[Any, ...]) -> Kernel | None:
        """The compiled kernel, if there is one that can be launched directly."""
        return None if has_several_gpus() else self._compiled.get((device.index, constants), (None, None))[1]


class RepeatedLaunch:
    """Launches a kernel again and again, each time with the same arguments but other outputs, its last tensors.

    All arguments but the outputs are converted only once. Only one thread at a time may use it.
    """

    def __init__(
        self,
        launcher: Launcher,
        device: th.device,
        grid: tuple[int, int],
        inputs: Sequence[th.Tensor],
        numbers: tuple[int, ...],
        constants: tuple[Any, ...],
    ) -> None:
        self._launcher = launcher
        self._device = device
        self._arguments = grid, inputs, numbers, constants
        self._run: Callable[[int, Sequence[th.Tensor]], None] | None = None

    def __call__(self, outputs: Sequence[th.Tensor]) -> None:
        if self._run is not None and not _profiler_is_on():
            self._run(th._C._cuda_getCurrentRawStream(self._device.index), outputs)
            return
        grid, inputs, numbers, constants = self._arguments
        tensors = (*inputs, *outputs)
        self._launcher(self._device, grid, tensors, numbers, constants)  # the first time, this compiles
        kernel = self._launcher.kernel(self._device, constants)
        if kernel is not None:
            self._run = kernel.repeated(grid, tensors, numbers, len(outputs))
