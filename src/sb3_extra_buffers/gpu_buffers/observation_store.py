"""Observations by place, with what they are made of on a torch device.

:class:`PackedObservationStore` is the store of :mod:`sb3_extra_buffers.storage.observation_store` with its frames on
the device; :class:`DenseObservationStore` keeps observations as they are, in one tensor.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.base import Codec, Indices
from sb3_extra_buffers.codecs.none import NoneCodec
from sb3_extra_buffers.codecs.zstd import ZstdCodec
from sb3_extra_buffers.errors import CapacityError
from sb3_extra_buffers.gpu_buffers import kernels
from sb3_extra_buffers.gpu_buffers.delta_codec import BatchDeltaCodec
from sb3_extra_buffers.gpu_buffers.device_arena import HeapBudget
from sb3_extra_buffers.gpu_buffers.device_frame_store import DeviceFrameStore
from sb3_extra_buffers.gpu_buffers.fields import Changes
from sb3_extra_buffers.gpu_buffers.kernels.batch import FieldBatch, ObservationBatch
from sb3_extra_buffers.gpu_buffers.places import Places
from sb3_extra_buffers.gpu_buffers.transfer import copy_into, torch_dtype, upload
from sb3_extra_buffers.storage.config import CodecRecipe
from sb3_extra_buffers.storage.frame_store import FrameStore
from sb3_extra_buffers.storage.observation_store import ObservationStore
from sb3_extra_buffers.storage.stacking import StackLayout

if TYPE_CHECKING:
    from sb3_extra_buffers.persistence.state import SavedState, State


class DeviceStore(ObservationStore):
    """What the stores of this module have in common. Observations leave them as tensors on ``device``."""

    def __init__(self, *args: Any, device: th.device, budget: HeapBudget, **kwargs: Any) -> None:
        self.device = device
        self.budget = budget
        self.gathers_fields = False
        """Whether a Triton kernel gathers observations, which can bring the fields along."""
        super().__init__(*args, **kwargs)
        self._plain_output = self.stored_dtype == self.output_dtype and self.divisor == 1.0

    def to(self, device: th.device) -> None:
        """Move everything to another device."""
        raise NotImplementedError

    def make_room(self) -> None:
        """For a step in all columns. All that can fail happens here, before anything is stored."""
        raise NotImplementedError

    def read_tensors(self, columns: list[int], places: Places, fields: FieldBatch | None = None) -> list[th.Tensor]:
        """The observations of each column at ``places``.

        :param fields: Fields to be gathered in the same launch, where :attr:`gathers_fields` says that this can be.
        """
        raise NotImplementedError

    def flush(self) -> None:
        """Bring the device up to date, without waiting for it."""
        raise NotImplementedError

    @property
    def device_bytes(self) -> int:
        raise NotImplementedError

    def _as_output(self, stored: th.Tensor) -> th.Tensor:
        """Stored values as a user wants them."""
        if self.stored_dtype != self.output_dtype:
            stored = stored.to(torch_dtype(self.dtype)).to(torch_dtype(self.output_dtype))
        return stored if self.divisor == 1.0 else stored / self.divisor


class PackedObservationStore(DeviceStore):
    """Compressed observations. Until the first few dozen steps have shown how to store them, they wait on the host."""

    frames: FrameStore

    def __init__(self, n_slots: int, *args: Any, **kwargs: Any) -> None:
        self._changes = Changes(n_slots)
        super().__init__(n_slots, *args, **kwargs)
        self._copy_ends()

    @property
    def device_frames(self) -> DeviceFrameStore | None:
        return self.frames if isinstance(self.frames, DeviceFrameStore) else None

    def to(self, device: th.device) -> None:
        self.device = device
        if self.device_frames is not None:
            self.device_frames.to(device)
            self.gathers_fields = self.device_frames.has_kernel
        self._copy_ends()

    def make_room(self) -> None:
        if self.device_frames is not None:
            self.device_frames.make_room(2, self._oldest)

    def write(self, column: int, slot: int, observations: npt.NDArray[Any], lanes: Indices | None = None) -> None:
        super().write(column, slot, observations, lanes)
        self._changes.note(slot)

    def clear(self) -> None:
        super().clear()
        self._changes.note_all()

    def read_tensors(self, columns: list[int], places: Places, fields: FieldBatch | None = None) -> list[th.Tensor]:
        frames = self.device_frames
        if frames is None:
            pairs = list(zip(columns, places.slots, strict=True))
            return [upload(array, self.device) for array in self.read(pairs, places.envs)]
        if self.gathers_fields:
            return self._launch(frames, columns, places, fields)
        return [
            self._as_output(self._merge(observations)) for observations in self._read_by_torch(frames, columns, places)
        ]

    def _launch(
        self, frames: DeviceFrameStore, columns: list[int], places: Places, fields: FieldBatch | None
    ) -> list[th.Tensor]:
        n, layout, is_bytes = len(places), self.layout, self.stored_dtype == np.uint8
        as_it_is = is_bytes and layout.is_contiguous
        shape = self.shape if as_it_is else (layout.stack, layout.frame.nbytes)
        outs = th.empty((len(columns), n, *shape), dtype=th.uint8, device=self.device).unbind(0)
        frames.launch(
            ObservationBatch(places.for_kernels, [self._ends_copies[column] for column in columns], outs, fields)
        )
        if as_it_is and self._plain_output:
            return list(outs)
        return [self._as_output(out if as_it_is else self._merge(out)) for out in outs]

    def _read_by_torch(self, frames: DeviceFrameStore, columns: list[int], places: Places) -> list[th.Tensor]:
        stack = self.layout.stack
        slots = zip(columns, places.slots, strict=True)
        host_firsts = [self.ends[column][some, places.envs].astype(np.int64) - stack for column, some in slots]
        if isinstance(self.codec, ZstdCodec):
            return frames.decode_on_host(places.envs, host_firsts)
        hints = frames.hints(places.envs, host_firsts)
        envs = places.env_tensor
        ends = [self._ends_copies[column][places.tensor[i], envs] for i, column in enumerate(columns)]
        return [frames.decode(envs, (end.to(th.int64) & 0xFFFFFFFF) - stack, hints) for end in ends]

    def flush(self) -> None:
        if not self._changes.count or (frames := self.device_frames) is None:
            return
        frames.encode_waiting(self._oldest)
        frames.flush()
        for part in self._changes.take():
            for copy, ends in zip(self._ends_copies, self.ends, strict=True):
                copy_into(copy[part], ends[part].view(np.int32))

    @property
    def device_bytes(self) -> int:
        frames = self.device_frames
        ends_bytes = sum(copy.nbytes for copy in self._ends_copies)
        return ends_bytes + (0 if frames is None else frames.device_bytes)

    def decide(self) -> None:
        before = self.frames, self.layout, self._recipe, self.ends
        try:
            super().decide()
        except CapacityError:
            if self.device_frames is not None:
                self.budget.taken -= self.device_frames.arena.size
            self.frames, self.layout, self._recipe, self.ends = before
            self.gathers_fields = False
            self._decide_at = self._steps + 1
            raise

    def _use(self, layout: StackLayout, recipe: CodecRecipe) -> None:
        if self._decide_at is not None:
            super()._use(layout, recipe)
            return
        self.layout = layout
        self._recipe = recipe
        codec = recipe.build(layout.frame)
        if recipe.method.name == "delta":
            codec = BatchDeltaCodec(layout.frame, frames_per_record=codec.frames_per_record)
        self.frames = DeviceFrameStore(codec, self.n_envs, layout, self.device, self.budget)
        self.gathers_fields = self.frames.has_kernel

    def _rebuild(self, layout: StackLayout, recipe: CodecRecipe) -> None:
        if self.device_frames is not None:
            self.budget.taken -= self.device_frames.arena.size
        super()._rebuild(layout, recipe)
        self._changes.note_all()

    def restore(self, state: SavedState) -> None:
        super().restore(state)
        self._copy_ends()

    def _copy_ends(self) -> None:
        shape = (self.n_slots, self.n_envs)
        self._ends_copies = [th.zeros(shape, dtype=th.int32, device=self.device) for _ in self.ends]
        self._changes.note_all()

    def _merge(self, frames: th.Tensor) -> th.Tensor:
        """Frames, ``(n, stack, frame_bytes)``, as observations."""
        n, stack = frames.shape[:2]
        values = frames if self.stored_dtype == np.uint8 else frames.contiguous().view(torch_dtype(self.stored_dtype))
        if not self.layout.is_contiguous:
            channels = self.shape[-1] // stack
            values = values.reshape(n, stack, -1, channels).transpose(1, 2)
        return values.reshape(n, *self.shape)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_ends_copies", "device")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.to(th.device("cpu"))


class DenseObservationStore(DeviceStore):
    """Observations as they are, in a tensor of all columns, slots and environments."""

    def _start(self) -> None:
        # Bytes, because torch can do little with some dtypes.
        n_bytes = math.prod(self.shape) * self.stored_dtype.itemsize
        shape = (len(self.ends), self.n_slots, self.n_envs, n_bytes)
        self.values = th.zeros(shape, dtype=th.uint8, device=self.device)
        self.gathers_fields = kernels.uses_triton(self.device)
        self.ends = []

    @property
    def codec(self) -> Codec:
        return NoneCodec(StackLayout(self.shape, self.stored_dtype).frame)

    @property
    def label(self) -> str:
        return "none"

    def to(self, device: th.device) -> None:
        self.device = device
        self.values = self.values.to(device)
        self.gathers_fields = kernels.uses_triton(device)

    def make_room(self) -> None:
        pass

    def write(self, column: int, slot: int, observations: Any, lanes: Indices | None = None) -> None:
        target = self.values[column, slot]
        if isinstance(observations, th.Tensor):
            target.copy_(observations.contiguous().view(len(observations), -1).view(th.uint8), non_blocking=True)
            return
        rows = np.ascontiguousarray(observations).reshape(len(observations), -1).view(np.uint8)
        if lanes is None:
            copy_into(target, rows)
        else:
            target[upload(lanes, self.device)] = upload(rows, self.device)

    def read(
        self, wanted: list[tuple[int, Indices]], envs: Indices, device: th.device | None = None
    ) -> list[npt.NDArray[Any]]:
        places = Places([slots for _, slots in wanted], envs, self.device)
        return [found.cpu().numpy() for found in self.read_tensors([column for column, _ in wanted], places)]

    def read_tensors(self, columns: list[int], places: Places, fields: FieldBatch | None = None) -> list[th.Tensor]:
        if self.gathers_fields:
            from sb3_extra_buffers.gpu_buffers.kernels.rows_triton import gather_rows

            shape = (len(places), self.values.shape[-1])
            found = [th.empty(shape, dtype=th.uint8, device=self.device) for _ in columns]
            gather_rows(places.for_kernels, [self.values[column] for column in columns], found, fields)
        else:
            envs = places.env_tensor
            found = [self.values[column][places.tensor[row], envs] for row, column in enumerate(columns)]
        dtype = torch_dtype(self.stored_dtype)
        return [self._as_output(values.view(dtype).view(len(places), *self.shape)) for values in found]

    def clear(self) -> None:
        self.values.zero_()

    def flush(self) -> None:
        pass

    @property
    def device_bytes(self) -> int:
        return self.values.nbytes

    def state(self) -> State:
        return {"values": self.values.cpu().numpy()}

    def restore(self, state: SavedState) -> None:
        values = state.array("values", np.uint8, tuple(self.values.shape))
        self.values = th.from_numpy(values).to(self.device)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "values": self.values.cpu(), "device": th.device("cpu")}
