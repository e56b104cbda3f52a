"""Observations on a torch device as they are, without a codec."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.base import Codec, Indices
from sb3_extra_buffers.codecs.none import NoneCodec
from sb3_extra_buffers.gpu_buffers import kernels
from sb3_extra_buffers.gpu_buffers.device_store import DeviceStore, Observations
from sb3_extra_buffers.gpu_buffers.kernels.batch import FieldBatch
from sb3_extra_buffers.gpu_buffers.places import Places
from sb3_extra_buffers.gpu_buffers.transfer import Outbox, copy_into, torch_dtype, upload
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.digests import digests_of
from sb3_extra_buffers.storage.stacking import StackLayout


class DenseObservationStore(DeviceStore):
    """Observations as they are, in a tensor of all columns, slots and environments."""

    _typed_view: th.Tensor | None = None

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

    @property
    def takes_tensors(self) -> bool:
        return self.device.type == "cuda"

    def make_room(self, step: Sequence[Observations]) -> None:
        pass

    def write(self, column: int, slot: int, observations: Any, lanes: Indices | None = None) -> None:
        if self.digests is not None:
            self.digests.columns[column][slot, slice(None) if lanes is None else lanes] = digests_of(observations)
        if isinstance(observations, th.Tensor):
            self._typed[column, slot].copy_(observations, non_blocking=True)
            return
        target = self.values[column, slot]
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
        stored = [values.view(dtype).view(len(places), *self.shape) for values in found]
        return [self._as_output(values) for values in self._verified(columns, places, stored)]

    def clear(self) -> None:
        self.values.zero_()
        if self.digests is not None:
            self.digests.clear(self.n_slots)

    def flush(self, outbox: Outbox) -> None:
        pass

    @property
    def device_bytes(self) -> int:
        return self.values.nbytes

    @property
    def _typed(self) -> th.Tensor:
        """The values as observations, (columns, slots, environments, *shape)."""
        if self._typed_view is None or self._typed_view.data_ptr() != self.values.data_ptr():
            dtype = torch_dtype(self.stored_dtype)
            self._typed_view = self.values.view(dtype).view(*self.values.shape[:3], *self.shape)
        return self._typed_view

    @property
    def has_changed(self) -> bool:
        return False

    def device_tensors(self) -> list[th.Tensor]:
        return [self.values]

    def check(self) -> None:
        self.check_device()

    def check_device(self) -> None:
        pass  # there is nothing but the observations

    def state(self) -> State:
        digests = {} if self.digests is None else self.digests.state()
        return {"values": self.values.cpu().numpy(), "digests": digests}

    def restore(self, state: SavedState) -> None:
        values = state.array("values", np.uint8, tuple(self.values.shape))
        self.values = th.from_numpy(values).to(self.device)
        self._restore_digests(state)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "values": self.values.cpu(), "_typed_view": None, "device": th.device("cpu")}
