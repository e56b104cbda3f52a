"""Rollout buffers on a torch device."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.buffers import DictRolloutBuffer
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples, RolloutBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers.compressed.rollout_buffer import CompressedRolloutBuffer
from sb3_extra_buffers.compressed.rows import SINGLE, part_of
from sb3_extra_buffers.gpu_buffers.base import BaseGpuBuffer, normal_tensors
from sb3_extra_buffers.gpu_buffers.transfer import empty, torch_dtype, upload
from sb3_extra_buffers.interruption import uninterrupted

_SENT_FIELDS = ("values", "log_probs", "advantages", "returns")
"""What a batch contains after observations and actions, in SB3's order."""
_ADDED_FIELDS = ("actions", "rewards", "episode_starts", "values", "log_probs")
"""The arguments of ``add`` after the observations, in order."""


def _array_property(name: str) -> Any:
    """A property for one of SB3's arrays. Accessing it first copies steps to the host that are only on the device."""

    def get(buffer: Any) -> npt.NDArray[Any]:
        buffer._fetch_fields()
        array: npt.NDArray[Any] = buffer.__dict__[name]
        return array

    def replace(buffer: Any, array: npt.NDArray[Any]) -> None:
        buffer._fetch_fields()
        buffer.__dict__[name] = array

    return property(get, replace)


class GpuRolloutBuffer(BaseGpuBuffer, CompressedRolloutBuffer):
    """SB3's ``RolloutBuffer`` on a torch device: same arguments, same batches under the same seed.

    Observations are sent to the device once, however many epochs train on them. Actions, values, log probabilities,
    advantages and returns are small: they are read from SB3's arrays and sent with each batch. If ``add`` gets all
    arguments after the observations as tensors on the device, they stay there until SB3's arrays are needed, normally
    when the rollout is complete, and are then copied to the host at once.

    Further arguments: see :class:`~sb3_extra_buffers.gpu_buffers.base.BaseGpuBuffer`.
    """

    _rebuilt: ClassVar[tuple[str, ...]] = ("_on_device", "_rows_on_device")

    actions = _array_property("actions")
    rewards = _array_property("rewards")
    episode_starts = _array_property("episode_starts")
    values = _array_property("values")
    log_probs = _array_property("log_probs")

    def _create_state(self) -> None:
        super()._create_state()
        self._rows_on_device: dict[str, th.Tensor] = {}
        """Tensors on the device with the shapes and dtypes of SB3's arrays, once a step has needed them."""

    def reset(self) -> None:
        with self._lock.held, uninterrupted(), normal_tensors():
            self._on_device: list[int] = []
            """Steps whose actions, rewards and so on are only in ``_rows_on_device``, not yet in SB3's arrays."""
            if self._stores:  # SB3's constructor is through
                self._follow_device()
            super().reset()

    def add(self, *args: Any, **kwargs: Any) -> None:
        with self._lock.held, uninterrupted(), normal_tensors():
            self._follow_device()
            if len(args) == 1 + len(_ADDED_FIELDS) and not kwargs and self.pos < self.buffer_size:
                fields = dict(zip(_ADDED_FIELDS, args[1:], strict=True))
                if all(isinstance(tensor, th.Tensor) and tensor.device == self._location for tensor in args[1:]):
                    self._add_tensors(args[0], fields)
                    return
            super().add(*args, **kwargs)

    def _add_tensors(self, obs: Any, fields: dict[str, th.Tensor]) -> None:
        """Add a step without a copy to the host."""
        pos, targets = self.pos, self._device_rows()
        rows = {name: tensor.detach().reshape(targets[name].shape[1:]) for name, tensor in fields.items()}
        self._write_observations(pos, self._checked_observations(obs))
        for name, row in rows.items():
            targets[name][pos].copy_(row)
        if self._on_device[-1:] != [pos]:
            self._on_device.append(pos)
        self._commit(pos, {})

    def _device_rows(self) -> dict[str, th.Tensor]:
        if not self._rows_on_device:
            arrays = {name: self.__dict__[name] for name in _ADDED_FIELDS}
            self._rows_on_device = {
                name: th.zeros(array.shape, dtype=torch_dtype(array.dtype), device=self._location)
                for name, array in arrays.items()
            }
        return self._rows_on_device

    def _fetch_fields(self) -> None:
        """Copy steps that are only on the device to SB3's arrays."""
        if not self.__dict__.get("_on_device"):  # SB3's constructor and unpickling have none yet
            return
        with self._lock.held:
            steps = self._on_device
            for name, rows in self._rows_on_device.items():
                # One copy of all rows, because nearly always all of them are needed.
                self.__dict__[name][steps] = rows.cpu().numpy()[steps]
            self._on_device = []  # last: an interrupted copy is repeated

    def _device_tensors(self) -> list[th.Tensor]:
        return [*super()._device_tensors(), *self._rows_on_device.values()]

    def _move_fields(self, location: th.device) -> None:
        self._fetch_fields()
        self._rows_on_device = {}

    def get(self, batch_size: int | None = None) -> Generator[RolloutBufferSamples, None, None]:
        self._fetch_fields()  # SB3 reads the arrays from __dict__ here, not through the properties
        return super().get(batch_size)

    def _checked_observations(self, obs: Any) -> Any:
        steps = [
            (store, store.checked_step((part_of(obs, key),), self._last_stream)) for key, store in self._stores.items()
        ]
        for store, _ in steps:
            store.prepare(1, self.pos)
        return steps

    def _write_observations(self, slot: int, checked: Any) -> None:
        # Until the position moves on, nobody reads this slot.
        for store, step in checked:
            store.write_step([(0, slot)], step)

    def _get_samples(self, batch_inds: npt.NDArray[np.int64], env: VecNormalize | None = None) -> Any:
        with self._lock.held, normal_tensors():
            self._follow_device()
            envs, slots = np.divmod(batch_inds, self.buffer_size)
            places = self._places([slots], envs)
            found = {key: store.read_tensors([0], places)[0] for key, store in self._stores.items()}
            parts: list[Any] = [found.get(SINGLE, found), *self._fields_at(batch_inds)]
            if not self._outputs_stay:
                parts = [self._to_device(part) for part in parts]
        return (RolloutBufferSamples if SINGLE in found else DictRolloutBufferSamples)(*parts)

    def _fields_at(self, batch_inds: npt.NDArray[np.int64]) -> list[th.Tensor]:
        """Actions and ``_SENT_FIELDS`` of a batch, from SB3's arrays: users may change these between batches."""
        actions = self.actions[batch_inds].astype(np.float32, copy=False)
        arrays = [actions, *(getattr(self, name)[batch_inds].reshape(-1) for name in _SENT_FIELDS)]
        if any(array.dtype != np.float32 for array in arrays):
            return [upload(array, self._location) for array in arrays]
        sizes = [array.size for array in arrays]
        staging, total = self._staging_for(sum(sizes), th.float32), sum(sizes)
        row = staging.next()
        np.concatenate([array.reshape(-1) for array in arrays], out=staging.arrays[row][:total])
        numbers = empty((total,), th.float32, self._location)
        numbers.copy_(staging.tensors[row][:total], non_blocking=self._location.type == "cuda")
        sent = numbers.split(sizes)  # type: ignore[no-untyped-call]
        # Views share a version counter: autograd would take a change of one tensor in place for a change of all.
        # ``.data`` gives each tensor its own.
        return [part.view(array.shape).data for part, array in zip(sent, arrays, strict=True)]


class GpuDictRolloutBuffer(GpuRolloutBuffer, DictRolloutBuffer):
    """:class:`GpuRolloutBuffer` for Dict observation spaces, with a store for each key."""

    if TYPE_CHECKING:

        def get(self, batch_size: int | None = None) -> Generator[DictRolloutBufferSamples, None, None]: ...  # type: ignore[override]
