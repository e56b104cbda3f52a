"""Triton kernels: one operation per file, each with the function that launches it.

Kernels cannot raise errors, so they trust what they read. The NumPy codecs define the bytes of records. Tests compare
the kernels with them, on machines without a GPU in Triton's interpreter.
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
"""The number of elements from which on a program handles larger blocks."""
REPORT_HEADER = 5
"""How many numbers come before the record lengths in a row of the report."""
LENGTH_BITS = 32
"""In an index entry, the lowest bits of the second number are the record's length, those above are its reference."""


class DeviceFrames(NamedTuple):
    """The tensors of a :class:`~sb3_extra_buffers.gpu_buffers.frame_store.DeviceFrameStore` that kernels work on."""

    heap: th.Tensor
    """``uint8``: the bytes of the records."""
    records: th.Tensor
    """``int64``, (lanes, capacity, 2): the index. For each record, its start in the heap; its length and reference."""
    table: th.Tensor
    """``int32``, (references, words): the reference frames. It has no rows if the method does not use them."""
    references: th.Tensor
    """``int64``, (lanes,): the number of each lane's current reference frame, which its next records use."""
    ring: th.Tensor
    """``uint8``, (lanes, frames, frame_bytes): the newest frames. Frame *i* is at position *i* modulo their number."""
    headers: th.Tensor
    """``int32``, (lanes, frames): the ``delta`` header of each frame in the ring that has been measured."""
    heads: th.Tensor
    """``int64``, (lanes,): the number of the next frame."""
    known: th.Tensor
    """``int32``, (lanes,): whether the newest frames are an observation, which the next one may share frames with."""
    encoded: th.Tensor
    """``int64``, (lanes,): the first frame of each lane that is not in a record."""
    report: th.Tensor
    """``int64``, (lanes, 5 + records): what the device measures for the host. For each lane: its head; how many words a
    newer reference would save in the newest frame; where its oldest observation ends; its first frame that is not in a
    record; its reference; and then the length of each complete record whose frames are in the ring."""
    orders: th.Tensor
    """``int64``, (3 * lanes,): what the host decides. First where in the heap the measured records of each lane begin,
    then how many of them to write, then the number of each lane's new reference frame, or 0 to keep the old one."""
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
            orders=zeros(3 * n_lanes),
            group=group,
            stack=stack,
        )

    @property
    def ring_frames(self) -> int:
        """Frames that the ring holds in each lane."""
        return self.ring.shape[1]

    @property
    def n_records(self) -> int:
        """The most records of each lane that are measured at a time."""
        return self.report.shape[1] - REPORT_HEADER

    @property
    def frame_bytes(self) -> int:
        return self.ring.shape[2]


class FieldRow(NamedTuple):
    """The fields of a slot. The launch that appends its observations writes them, too."""

    row: th.Tensor
    """``int32``, in pinned memory of the host."""
    fields: th.Tensor
    """``int32``, (slots, words in a row)."""
    slot: int


class FieldBatch(NamedTuple):
    """Fields to gather in the launch that rebuilds observations, and the tensors for them. Words are 4 bytes."""

    fields: th.Tensor
    """``int32``, (slots, words in a row)."""
    actions: th.Tensor
    rewards: th.Tensor
    dones: th.Tensor
    constants: tuple[int, ...]
    """Words in a row; words in an action; this rounded up to a power of two; and the words of a row at which actions,
    rewards, dones and timeouts begin."""


def no_fields(anything: th.Tensor) -> FieldBatch:
    """A placeholder for launches without fields. Kernels do not access its tensors, since actions have 0 words."""
    return FieldBatch(anything, anything, anything, anything, (0,) * 7)


class ObservationBatch(NamedTuple):
    """A batch to rebuild: observations of one or two columns, and the tensors to write them to."""

    places: Places
    ends: list[th.Tensor]
    """For each column, ``int32`` (slots, environments): the frame after an observation's last one."""
    outs: Sequence[th.Tensor]
    """For each column, ``uint8``, with the bytes of ``len(places)`` observations."""
    fields: FieldBatch | None = None

    @property
    def outputs(self) -> tuple[th.Tensor, ...]:
        """The tensors that kernels write to: always two for observations and three for fields, used or not."""
        first = self.outs[0]
        return (first, self.outs[-1], *((first, first, first) if self.fields is None else self.fields[1:4]))


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed, and new enough for :class:`Launcher`."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        version = importlib.import_module("triton").__version__
    except ImportError:  # early versions need setuptools, but do not declare it
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
    """Import a module of this package. They need Triton, so they are not imported before they are used."""
    return importlib.import_module(f"{__name__}.{name}")


def block_size(n_elements: int, usual: int = 2048) -> int:
    """How many elements a program handles at a time: a power of two, and a larger one for large inputs."""
    return min(1 << (n_elements - 1).bit_length(), usual if n_elements < _LARGE else 8192)


@functools.cache
def _runtime() -> Any:
    """Triton's runtime settings; ``None`` if :class:`Kernel` may not know how this version passes arguments."""
    triton = importlib.import_module("triton")
    return triton.knobs.runtime if triton.__version__.startswith(("3.6.", "3.7.")) else None


def _profiler_is_on() -> bool:
    """Whether a profiler has hooked into Triton's launches."""
    return bool(_runtime().launch_enter_hook.calls)


class Launcher:
    """Launches a Triton kernel. Triton inspects every argument of every call, which takes longer than the kernel.

    So the first call compiles the kernel for its ``constants``. Later calls with the same ones only pass the addresses
    of tensors and the numbers. The kernel must not specialize on its numbers. Tensors must be aligned to 16 bytes, as
    torch allocates them: the compiled kernel assumes it.
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
        :param constants: The last arguments of the kernel, for which it is compiled. Calls with tensors of other dtypes
            must have other constants, too.
        """
        if has_several_gpus() and device.type == "cuda" and device.index != th.cuda.current_device():
            with th.cuda.device(device):
                self(device, grid, tensors, numbers, constants)
            return
        found = self._compiled.get((device.index, constants))
        if found is None:
            # Triton's interpreter returns None.
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
        """The compiled kernel; ``None`` if there is none that can be launched directly."""
        return None if has_several_gpus() else self._compiled.get((device.index, constants), (None, None))[1]


class RepeatedLaunch:
    """Launches a kernel repeatedly with the same arguments except for the outputs, which are its last tensors.

    The other arguments are converted only once. Only one thread at a time may use it.
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
