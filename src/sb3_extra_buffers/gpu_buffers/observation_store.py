"""Observations by place, with what they are made of on a torch device.

:class:`PackedObservationStore` is the store of :mod:`sb3_extra_buffers.storage.observation_store` with its frames on
the device; :class:`.dense_store.DenseObservationStore` keeps observations as they are, in one tensor.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.codecs.zstd import ZstdCodec
from sb3_extra_buffers.errors import CapacityError
from sb3_extra_buffers.gpu_buffers.changes import Changes
from sb3_extra_buffers.gpu_buffers.checking import check_frames, check_same
from sb3_extra_buffers.gpu_buffers.delta_codec import BatchDeltaCodec
from sb3_extra_buffers.gpu_buffers.device_store import DeviceStore, Observations
from sb3_extra_buffers.gpu_buffers.kernels.batch import FieldBatch, ObservationBatch
from sb3_extra_buffers.gpu_buffers.places import Places
from sb3_extra_buffers.gpu_buffers.tensor_frame_store import News, Receiver, TensorFrameStore
from sb3_extra_buffers.gpu_buffers.transfer import CPU, Outbox, torch_dtype, upload
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.config import CodecRecipe
from sb3_extra_buffers.storage.frame_store import FrameStore
from sb3_extra_buffers.storage.observation_store import REVIEW_STEPS
from sb3_extra_buffers.storage.stacking import StackLayout

_ALIGNMENT = 16
"""What kernels take for granted of tensors."""


class PackedObservationStore(DeviceStore):
    """Compressed observations. Until the first few dozen steps have shown how to store them, they wait on the host."""

    frames: FrameStore

    def __init__(self, n_slots: int, **kwargs: Any) -> None:
        self._decide_again = False
        """Whether observations are still on the host because there was no room for them on the device."""
        self._changes = Changes(n_slots)
        """Slots of which the device does not know yet."""
        self._news = Changes(n_slots)
        """Slots of which the host does not know yet."""
        super().__init__(n_slots=n_slots, **kwargs)
        self._copy_ends()

    @property
    def device_frames(self) -> TensorFrameStore | None:
        return self.frames if isinstance(self.frames, TensorFrameStore) else None

    @property
    def takes_tensors(self) -> bool:
        # Checksums are made on the host.
        return self.digests is None and self.device_frames is not None and self.device_frames.takes_tensors

    def to(self, device: th.device) -> None:
        self._take_back()
        self.device = device
        if self.device_frames is not None:
            self.device_frames.to(device)
            self.gathers_fields = self.device_frames.has_kernel
        self._copy_ends()

    def make_room(self, step: Sequence[Observations]) -> None:
        if self._decide_again:
            self._decide()
        frames = self.device_frames
        if frames is None:
            return
        if isinstance(step[0], th.Tensor):
            if not frames.is_ahead:
                with Outbox(self.device) as outbox:
                    self.flush(outbox)
            frames.make_room_on_device(len(step), self._oldest, self._ends_for_host)
        else:
            self._take_back()
            frames.make_room(len(step), self._oldest)

    def write(self, column: int, slot: int, observations: npt.NDArray[Any], lanes: Indices | None = None) -> None:
        self._take_back()
        self._changes.note(slot)
        super().write(column, slot, observations, lanes)

    def write_step(self, places: list[tuple[int, int]], step: Sequence[Observations]) -> None:
        frames = self.device_frames
        if frames is None or not isinstance(step[0], th.Tensor):
            write = super().write  # make_room() has taken back what the device knew
            for (column, slot), observations in zip(places, step, strict=True):
                self._changes.note(slot)
                write(column, slot, observations)  # type: ignore[arg-type]  # no tensors
            return
        ends = [self._ends_copies[column] for column, _ in places]
        slots = [slot for _, slot in places]
        for slot in slots:
            self._news.note(slot)
            self.slots_used = max(self.slots_used, slot + 1)
        frames.append_on_device([self._cut(tensor) for tensor in step], ends, slots)  # type: ignore[arg-type]
        self._steps += 1
        if self._steps % REVIEW_STEPS == 0:
            self._review()
        if frames.arena.nbytes > self._compact_at:
            self.compact()

    def clear(self) -> None:
        self._changes.note_all()
        super().clear()
        for copy in self._ends_copies:
            copy.zero_()
        self._news.forget()
        self._changes.forget()

    def read(self, wanted: list[tuple[int, Indices]], envs: Indices, device: th.device = CPU) -> list[npt.NDArray[Any]]:
        self._learn_ends()
        return super().read(wanted, envs, device)

    def read_tensors(self, columns: list[int], places: Places, fields: FieldBatch | None = None) -> list[th.Tensor]:
        frames = self.device_frames
        if frames is None:
            pairs = list(zip(columns, places.slots, strict=True))
            return [upload(array, self.device) for array in self.read(pairs, places.envs)]
        if self.gathers_fields:
            if not frames.decodes_zstd or frames.all_compressed(places.envs, self._first_frames(columns, places)):
                return self._launch(frames, columns, places, fields)
            if fields is not None:
                from sb3_extra_buffers.gpu_buffers.kernels.fields_triton import gather_fields

                gather_fields(places.for_kernels, len(places.slots), fields)
        # All columns are decoded in one go, but what is given away is nobody else's.
        stored = [self._merge(part) for part in self._read_by_torch(frames, columns, places)]
        return [self._as_output(part).clone() for part in self._verified(columns, places, stored)]

    def _launch(
        self, frames: TensorFrameStore, columns: list[int], places: Places, fields: FieldBatch | None
    ) -> list[th.Tensor]:
        n, layout, is_bytes = len(places), self.layout, self.stored_dtype == np.uint8
        as_it_is = is_bytes and layout.is_contiguous
        shape = self.shape if as_it_is else (layout.stack, layout.frame.nbytes)
        outs = [th.empty((n, *shape), dtype=th.uint8, device=self.device) for _ in columns]
        frames.launch(
            ObservationBatch(places.for_kernels, [self._ends_copies[column] for column in columns], outs, fields)
        )
        stored = outs if as_it_is else [self._merge(out) for out in outs]
        if self.digests is None and self._plain_output:
            return stored
        return [self._as_output(part) for part in self._verified(columns, places, stored)]

    def _first_frames(self, columns: list[int], places: Places) -> Indices:
        return self._firsts(list(zip(columns, places.slots, strict=True)), places.envs)

    def _read_by_torch(self, frames: TensorFrameStore, columns: list[int], places: Places) -> list[th.Tensor]:
        stack = self.layout.stack
        if frames.is_ahead:
            hints = frames.hints_for_any()
        else:
            firsts = self._first_frames(columns, places)
            hints = frames.hints(places.envs, firsts)
            if isinstance(self.codec, ZstdCodec) and not (frames.decodes_zstd and hints.all_compressed):
                return frames.decode_records(places.envs, firsts)
        envs = places.env_tensor
        ends = th.cat([self._ends_copies[column][places.tensor[i], envs] for i, column in enumerate(columns)])
        device_firsts = (ends.to(th.int64) & 0xFFFFFFFF) - stack
        return list(frames.decode(envs.repeat(len(columns)), device_firsts, hints).chunk(len(columns)))

    @property
    def has_changed(self) -> bool:
        frames = self.device_frames
        return frames is not None and (bool(self._changes.count) or frames.is_ahead or frames.has_changed)

    def flush(self, outbox: Outbox) -> None:
        if (frames := self.device_frames) is None:
            return
        if frames.is_ahead:
            frames.collect(self._oldest)
            frames.flush(outbox)
            return
        if not self._changes.count and not frames.has_changed:
            return
        frames.encode_waiting(self._oldest)
        frames.flush(outbox)
        for part in self._changes.slices():
            for copy, ends in zip(self._ends_copies, self.ends, strict=True):
                outbox.put(copy, part.start, ends[part].view(np.int32))
        outbox.when_sent(self._changes.forget)

    @property
    def device_bytes(self) -> int:
        frames = self.device_frames
        ends_bytes = sum(copy.nbytes for copy in self._ends_copies)
        return ends_bytes + (0 if frames is None else frames.device_bytes)

    def device_tensors(self) -> list[th.Tensor]:
        frames = self.device_frames
        return [*self._ends_copies, *([] if frames is None else frames.device_tensors())]

    def check(self) -> None:
        if self.device_frames is None or not self.device_frames.is_ahead:  # otherwise the host knows only a part
            super().check()
        self.check_device()

    def check_device(self) -> None:
        """Raise :class:`~sb3_extra_buffers.errors.CorruptDataError` if something is not as it must be.

        Nothing is sent or moved that would not be otherwise, so that looking changes nothing.
        """
        frames = self.device_frames
        if frames is None:
            return
        check_frames(frames)
        if not self._changes.count and not self._news.count:
            for column, (copy, ends) in enumerate(zip(self._ends_copies, self.ends, strict=True)):
                check_same(f"where the observations of column {column} end", copy.cpu().numpy().view(np.uint32), ends)

    def decide(self) -> None:
        # Observations have been written at this point, so it is too late to refuse them: they stay on the host, and the
        # next ones are refused unless there is room then.
        try:
            self._decide()
        except CapacityError:
            self._decide_again = True

    def _decide(self) -> None:
        self._decide_again = False
        try:
            super().decide()
        except BaseException:
            self._decide_again = True
            raise

    def _review(self) -> None:
        with contextlib.suppress(CapacityError):  # there is no room for anything better
            super()._review()

    def compact(self) -> None:
        with contextlib.suppress(CapacityError):
            super().compact()

    def use(self, layout: StackLayout, recipe: CodecRecipe) -> None:
        if self._decide_at is not None:
            super().use(layout, recipe)
            return
        self.layout = layout
        self.recipe = recipe
        codec = recipe.build(layout.frame)
        if recipe.method.name == "delta":
            codec = BatchDeltaCodec(layout.frame, frames_per_record=codec.frames_per_record)
        self.frames = TensorFrameStore(codec, self.n_envs, layout, self.device, self.budget)
        self.gathers_fields = self.frames.has_kernel

    def rebuild(self, layout: StackLayout, recipe: CodecRecipe) -> None:
        self._take_back()
        before, taken = dict(self.__dict__), self.budget.taken
        try:
            if self.device_frames is not None:
                self.budget.taken -= self.device_frames.arena.size
            super().rebuild(layout, recipe)
        except BaseException:
            # What is there already serves as it did.
            self.__dict__.update(before)
            self.budget.taken = taken
            raise
        finally:
            self._changes.note_all()

    def renumber(self) -> None:
        self.rebuild(self.layout, self.recipe)

    def state(self) -> State:
        self._take_back()
        return super().state()

    def restore(self, state: SavedState) -> None:
        super().restore(state)
        self._copy_ends()

    def _copy_ends(self) -> None:
        shape = (self.n_slots, self.n_envs)
        self._ends_copies = [th.zeros(shape, dtype=th.int32, device=self.device) for _ in self.ends]
        self._changes.note_all()

    def _take_back(self) -> None:
        """Let the host know everything."""
        frames = self.device_frames
        if frames is not None and frames.is_ahead:
            self._learn_ends()  # first: it is for the device to say only as long as it is ahead
            frames.take_back(self._oldest)

    def _learn_ends(self) -> None:
        frames = self.device_frames
        if frames is not None and frames.is_ahead and frames.drop_news():
            self._news.note_all()  # what the report would have told, and perhaps is older than what is read now
        for part in self._news.slices():
            for copy, ends in zip(self._ends_copies, self.ends, strict=True):
                ends[part] = copy[part].cpu().numpy().view(np.uint32)
        self._news.forget()

    def _ends_for_host(self) -> News:
        tensors: list[th.Tensor] = []
        receivers: list[Receiver] = []
        for part in self._news.slices():
            for copy, ends in zip(self._ends_copies, self.ends, strict=True):
                tensors.append(copy[part])
                receivers.append(functools.partial(_receive, ends, part))
        return News(tensors, receivers, self._news.forget)

    def _cut(self, observations: th.Tensor) -> th.Tensor:
        """Observations as frames, ``(n, stack, frame_bytes)``."""
        n, stack = len(observations), self.layout.stack
        if not self.layout.is_contiguous:
            channels = self.shape[-1] // stack
            observations = observations.reshape(n, -1, stack, channels).transpose(1, 2)
        observations = observations.contiguous()
        if observations.data_ptr() % _ALIGNMENT:
            observations = observations.clone()
        return observations.view(n, -1).view(th.uint8).view(n, stack, -1)

    def _merge(self, frames: th.Tensor) -> th.Tensor:
        """Frames, ``(n, stack, frame_bytes)``, as observations."""
        n, stack = frames.shape[:2]
        values = frames if self.stored_dtype == np.uint8 else frames.contiguous().view(torch_dtype(self.stored_dtype))
        if not self.layout.is_contiguous:
            channels = self.shape[-1] // stack
            values = values.reshape(n, stack, -1, channels).transpose(1, 2)
        return values.reshape(n, *self.shape)

    def __getstate__(self) -> dict[str, Any]:
        self._take_back()
        return {name: value for name, value in self.__dict__.items() if name not in ("_ends_copies", "device")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"_decide_again": False, **state})
        self.to(CPU)


def _receive(ends: npt.NDArray[np.uint32], part: slice, array: npt.NDArray[np.int32]) -> None:
    ends[part] = array.view(np.uint32)
