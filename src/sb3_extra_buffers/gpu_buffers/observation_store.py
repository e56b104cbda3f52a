"""Stores of observations on a torch device.

:class:`PackedObservationStore` is the store of :mod:`sb3_extra_buffers.storage.observation_store` with its frames on
the device. :class:`DenseObservationStore` keeps observations uncompressed, in one tensor.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.base import Codec, Indices
from sb3_extra_buffers.codecs.none import NoneCodec
from sb3_extra_buffers.errors import CapacityError
from sb3_extra_buffers.gpu_buffers.arena import CappedArena, CappedFrameStore
from sb3_extra_buffers.gpu_buffers.device_codecs import device_codec, host_codec
from sb3_extra_buffers.gpu_buffers.device_store import DeviceStore, Step
from sb3_extra_buffers.gpu_buffers.frame_store import DeviceFrameStore
from sb3_extra_buffers.gpu_buffers.kernels import FieldBatch, FieldRow, ObservationBatch, kernel_module, uses_triton
from sb3_extra_buffers.gpu_buffers.transfer import (
    CPU,
    ObservationStaging,
    Places,
    allocator,
    copy_into,
    empty,
    torch_dtype,
    upload,
)
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.compiled_gathering import Wanted
from sb3_extra_buffers.storage.config import CodecRecipe
from sb3_extra_buffers.storage.frame_store import FrameStore
from sb3_extra_buffers.storage.observation_store import REVIEW_STEPS, ObservationStore
from sb3_extra_buffers.storage.pickling import unpickled
from sb3_extra_buffers.storage.stacking import StackLayout

_FRAMES_PER_SLOT = 1.1
"""The new frames per slot for which the index has room from the start. Most slots add one frame."""


class PackedObservationStore(DeviceStore):
    """Compressed observations.

    They are in host memory until the first few dozen steps have shown how they stack frames. They stay there if there
    are no kernels: without Triton, and with ``zstd``.

    While frames are on the device, ``frames.ends`` says where observations end, and the host's ``ends`` is out of date.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._decision_is_pending = False
        """Whether observations are still uncompressed on the host because the device had no room for them."""
        super().__init__(**kwargs)
        self._send_ends()

    @property
    def device_frames(self) -> DeviceFrameStore | None:
        return self.frames if isinstance(self.frames, DeviceFrameStore) else None

    @property
    def gathers_fields(self) -> bool:
        return isinstance(self.frames, DeviceFrameStore)

    takes_fields = gathers_fields

    def to(self, device: th.device) -> None:
        before = dict(self.__dict__)
        state = unpickled(copy.deepcopy(self.state()))
        try:
            self.device = device
            self.restore(state)
        except BaseException:
            self._undo(before)
            raise

    def checked_step(self, step: Sequence[Any], stream: th.cuda.Stream | None = None) -> Step:
        if self._decision_is_pending:
            self._decide()
        frames = self.device_frames
        if frames is not None and all(map(self._can_stay, step)):
            return Step(frames.staging.take(step, stream), None)
        arrays, digests = self._checked_arrays(step)
        return Step(arrays if frames is None else frames.staging.send(arrays), digests)

    def write_step(self, places: list[tuple[int, int]], step: Step, fields: FieldRow | None = None) -> None:
        frames = self.device_frames
        if frames is None:
            self.place(places, self.append(step.parts))
            self.finish_step()
            return
        self._append_on_device(frames, places, step, fields=fields)
        self._steps += 1
        if self._steps % REVIEW_STEPS == 0:
            self._review()

    def _append_on_device(
        self,
        frames: DeviceFrameStore,
        places: list[tuple[int, int]],
        step: Step,
        lanes: Indices | None = None,
        fields: FieldRow | None = None,
    ) -> None:
        columns, slots = zip(*places, strict=True)
        self.slots_used = max(self.slots_used, 1 + max(slots))
        frames.append_on_device(step.parts, [frames.ends[column] for column in columns], slots, lanes, fields)
        self._place_digests(places, step.digests, lanes)

    def write(self, column: int, slot: int, observations: npt.NDArray[Any], lanes: Indices | None = None) -> None:
        frames = self.device_frames
        if frames is None:
            super().write(column, slot, observations, lanes)
            return
        with self.lock.held, uninterrupted():
            self._wait()
            digests = self._digests_of([observations])
            frames.make_room(1, self._oldest)
            self._append_on_device(frames, [(column, slot)], Step(frames.staging.send([observations]), digests), lanes)
            frames.staging.forget()  # this is not the next observation of the newest step
            if frames.arena.nbytes > self._compact_at:  # slots written in random order leave dead records behind
                self.compact()
            self._wait()

    def is_shared(self, previous: int, slot: int) -> npt.NDArray[np.bool_]:
        frames = self.device_frames
        if frames is None:
            return super().is_shared(previous, slot)
        return (frames.ends[1][previous] == frames.ends[0][slot]).cpu().numpy()

    def _read(self, wanted: Wanted, envs: Indices, as_stored: bool) -> list[npt.NDArray[Any]]:
        if self.device_frames is None:
            stored = ObservationStore.read_stored(self, wanted, envs, CPU)
            return stored if as_stored else self.converted(stored)
        return super()._read(wanted, envs, as_stored)

    def read_tensors(
        self, columns: list[int], places: Places, fields: FieldBatch | None = None, as_stored: bool = False
    ) -> list[th.Tensor]:
        frames = self.device_frames
        if frames is None:
            # Divide on the device, as for frames that are there: a GPU rounds differently than the host.
            wanted = [(column, places.host_slots(i)) for i, column in enumerate(columns)]
            stored = [upload(array, self.device) for array in self.read_stored(wanted, places.envs, CPU)]
            return stored if as_stored else self._converted(stored)
        layout, n = self.layout, places.n
        is_plain = self.stored_dtype == np.uint8 and layout.is_contiguous
        shape = (n, *self.shape) if is_plain else (n, layout.stack, layout.frame.nbytes)
        new = allocator(shape, th.uint8, self.device)
        outs = [new() for _ in columns]
        if n:
            frames.launch(ObservationBatch(places, [frames.ends[column] for column in columns], outs, fields))
        stored = outs if is_plain else [self._merge(out) for out in outs]
        return self._outputs_of(columns, places, stored, as_stored)

    def _merge(self, frames: th.Tensor) -> th.Tensor:
        """Merge frames, ``(n, stack, frame_bytes)``, into observations."""
        n, stack = frames.shape[:2]
        values = frames.view(torch_dtype(self.stored_dtype))
        if not self.layout.is_contiguous:
            values = values.reshape(n, stack, -1, self.shape[-1] // stack).transpose(1, 2)
        return values.reshape(n, *self.shape)

    def clear(self) -> None:
        with self.lock.held, uninterrupted():
            super().clear()
            if self.device_frames is not None:
                for ends in self.device_frames.ends:
                    ends.zero_()

    def device_tensors(self) -> list[th.Tensor]:
        frames = self.device_frames
        return [] if frames is None else [*frames.ends, *frames.device_tensors()]

    def check(self) -> None:
        with self.lock.held:
            self._fetch_ends()
            super().check()

    def check_device(self) -> None:
        with self.lock.held:
            if self.device_frames is not None:
                self.device_frames.check()

    def state(self) -> State:
        with self.lock.held:
            self._fetch_ends()
            return super().state()

    def restore(self, state: SavedState) -> None:
        super().restore(state)
        self._send_ends()

    def decide(self) -> None:
        # These observations are already stored, so it is too late to refuse them. They stay on the host, and the next
        # step is refused unless the device has room by then.
        with contextlib.suppress(CapacityError):
            self._decide()

    def _decide(self) -> None:
        self._decision_is_pending = True
        super().decide()
        self._decision_is_pending = False

    def _review(self) -> None:
        with contextlib.suppress(CapacityError):  # if there is no room, keep what is stored as it is
            super()._review()

    def compact(self) -> None:
        self._fetch_ends()
        with contextlib.suppress(CapacityError):
            super().compact()

    def renumber(self) -> None:
        self._fetch_ends()
        frames = self.device_frames
        with uninterrupted():
            super().renumber()
            if frames is not None and self.frames is frames:  # otherwise all observations were stored again
                self._send_ends()
                frames.send_numbers()

    def rebuild(self, layout: StackLayout, recipe: CodecRecipe) -> None:
        before = dict(self.__dict__)
        self._fetch_ends()
        try:
            super().rebuild(layout, recipe)
            self._send_ends()
        except BaseException:
            self._undo(before)
            raise

    def _undo(self, before: dict[str, Any]) -> None:
        """Restore the attributes from before a change that failed."""
        with uninterrupted():
            self.__dict__.update(before)
            self._register_arena(self.frames)

    def _make_frames(self, layout: StackLayout, recipe: CodecRecipe, begin_after: Indices | None = None) -> FrameStore:
        if self._decide_at is not None:
            return super()._make_frames(layout, recipe, begin_after)
        codec = device_codec(recipe, layout.frame) if uses_triton(self.device) else None
        frames: FrameStore
        if codec is None:
            own = host_codec(recipe, layout.frame)
            frames = CappedFrameStore(own, self.n_envs, layout, CappedArena(self.budget), 2, begin_after)
        else:
            index_size = max(int(self.n_slots * _FRAMES_PER_SLOT) // codec.frames_per_record, 8)
            frames = DeviceFrameStore(codec, self.n_envs, layout, self.device, self.budget, index_size)
        self._register_arena(frames)
        return frames

    def _register_arena(self, frames: FrameStore) -> None:
        """Count the arena of ``frames`` against the budget, instead of this store's previous arena."""
        self.budget.arenas.pop(id(self), None)
        if isinstance(frames.arena, CappedArena):
            self.budget.arenas[id(self)] = frames.arena

    def _send_ends(self) -> None:
        """Copy ``ends`` to the device."""
        if self.device_frames is not None:
            self.device_frames.ends = [upload(ends.view(np.int32), self.device) for ends in self.ends]

    def _fetch_ends(self) -> None:
        """Copy ``ends`` and the lanes' heads to the host, which waits for the device."""
        frames = self.device_frames
        if frames is not None and frames.ends:
            frames.fetch_heads()
            self.ends = [ends.cpu().numpy().view(np.uint32) for ends in frames.ends]


class DenseObservationStore(DeviceStore):
    """Uncompressed observations, in one tensor of all columns, slots and environments."""

    def _start(self) -> None:
        # Bytes, because torch supports few operations for some dtypes.
        self._row_bytes = math.prod(self.shape) * self.stored_dtype.itemsize
        shape = (len(self.ends), self.n_slots, self.n_envs, self._row_bytes)
        self.values = th.zeros(shape, dtype=th.uint8, device=self.device)
        self.layout = StackLayout(self.shape, self.stored_dtype)
        self._staging = ObservationStaging(self.layout, self.n_envs, self.device)
        self._newest = 0, 0
        """The column and slot of the last observation of the newest step."""
        self.ends = []

    @property
    def gathers_fields(self) -> bool:
        return uses_triton(self.device) and self._has_elements

    @property
    def codec(self) -> Codec:
        return NoneCodec(self.layout.frame)

    @property
    def label(self) -> str:
        return "none"

    @property
    def payload_bytes(self) -> int:
        return self.values.nbytes * self.slots_used // self.n_slots

    @property
    def reference_bytes(self) -> int:
        return 0

    def index_bytes(self, filled: float) -> int:
        return 0 if self.digests is None else round(filled * self.digests.nbytes)

    def to(self, device: th.device) -> None:
        self.values, self.device = self.values.to(device), device
        self._staging = ObservationStaging(self.layout, self.n_envs, device)

    def checked_step(self, step: Sequence[Any], stream: th.cuda.Stream | None = None) -> Step:
        if all(map(self._can_stay, step)):
            return Step(self._staging.take(step, stream), None)
        arrays, digests = self._checked_arrays(step)
        return Step(self._staging.send(arrays), digests)

    def prepare(self, n_observations: int, slot: int | None = None) -> None:
        pass  # the tensor has room for all slots

    def write_step(self, places: list[tuple[int, int]], step: Step, fields: FieldRow | None = None) -> None:
        parts, (pixels, chunk, item), continues = step.parts
        if continues and places[0] != self._newest:  # with optimize_memory_usage, they are usually the same
            self.values[places[0]].copy_(self.values[self._newest])
        for (column, slot), part in zip(places[continues:], parts, strict=True):
            target = self.values[column, slot].view(-1)
            rows = part.view(-1)[: target.numel()]
            if pixels > 1:
                target = target.view(self.n_envs, chunk // item, pixels, item).transpose(1, 2)
                rows = rows.view(self.n_envs, pixels, chunk // item, item)
            target.copy_(rows)
            self.slots_used = max(self.slots_used, slot + 1)
        self._newest = places[-1]
        self._staging.note_appended()
        self._place_digests(places, step.digests)

    def write(self, column: int, slot: int, observations: npt.NDArray[Any], lanes: Indices | None = None) -> None:
        with self.lock.held, uninterrupted():
            self._wait()
            self._staging.forget()
            # As bytes: torch does not support indexed assignment for all dtypes.
            rows = upload(observations, self.device).view(th.uint8).view(-1, self._row_bytes)
            if lanes is None:
                self.values[column, slot].copy_(rows)
            else:
                self.values[column, slot, upload(lanes, self.device)] = rows
            self.slots_used = max(self.slots_used, slot + 1)
            self._place_digests([(column, slot)], self._digests_of([observations]), lanes)
            self._wait()

    def read_tensors(
        self, columns: list[int], places: Places, fields: FieldBatch | None = None, as_stored: bool = False
    ) -> list[th.Tensor]:
        n = places.n
        if self.gathers_fields and n:
            found = [empty((n, self._row_bytes), th.uint8, self.device) for _ in columns]
            kernel_module("gather").gather_rows(places, [self.values[column] for column in columns], found, fields)
        else:
            found = [self.values[column][places.rows(i)] for i, column in enumerate(columns)]
        dtype = torch_dtype(self.stored_dtype)
        stored = [values.view(dtype).view(n, *self.shape) for values in found]
        return self._outputs_of(columns, places, stored, as_stored)

    def is_shared(self, previous: int, slot: int) -> npt.NDArray[np.bool_]:
        return (self.values[1, previous] == self.values[0, slot]).all(dim=1).cpu().numpy()

    def clear(self) -> None:
        with self.lock.held:
            self._staging.forget()
            self.values.zero_()
            if self.digests is not None:
                self.digests.clear(self.n_slots)

    def device_tensors(self) -> list[th.Tensor]:
        return [self.values, *self._staging.tensors]

    def check(self) -> None:
        pass  # a tensor of observations has no invariants

    def check_device(self) -> None:
        pass

    def state(self) -> State:
        digests = {} if self.digests is None else self.digests.state()
        return {"values": self.values.cpu().numpy(), "digests": digests}

    def restore(self, state: SavedState) -> None:
        self._staging.forget()
        copy_into(self.values, state.array("values", np.uint8, tuple(self.values.shape)))
        self.slots_used = self.n_slots
        self._restore_digests(state)
