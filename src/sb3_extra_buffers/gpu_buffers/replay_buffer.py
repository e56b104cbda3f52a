"""Replay buffers on a torch device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize
from typing_extensions import Unpack

from sb3_extra_buffers.compressed.base import SINGLE
from sb3_extra_buffers.compressed.replay_buffer import CompressedReplayBuffer
from sb3_extra_buffers.gpu_buffers import batch_memory
from sb3_extra_buffers.gpu_buffers.base import BaseGpuBuffer, GpuOptions, part_of
from sb3_extra_buffers.gpu_buffers.fields import Fields
from sb3_extra_buffers.gpu_buffers.kernels import uses_triton
from sb3_extra_buffers.gpu_buffers.kernels.batch import FieldBatch
from sb3_extra_buffers.gpu_buffers.normalization import normalize_obs, normalize_reward
from sb3_extra_buffers.gpu_buffers.places import Places
from sb3_extra_buffers.gpu_buffers.transfer import Outbox

if TYPE_CHECKING:
    from sb3_extra_buffers.persistence.state import SavedState

_ONE_COLUMN, _TWO_COLUMNS = [0, 0], [0, 1]
_FIELDS = ("actions", "rewards", "dones", "timeouts")


class GpuReplayBuffer(BaseGpuBuffer, CompressedReplayBuffer):
    """SB3's ``ReplayBuffer`` on a torch device: same arguments, same batches under the same seed.

    Observations are compressed on the host and rebuilt on the device. Actions, rewards, dones and timeouts are there as
    well, so that sampling sends nothing but the places of the transitions.

    Further arguments: see :class:`~sb3_extra_buffers.gpu_buffers.base.BaseGpuBuffer`.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        **options: Unpack[GpuOptions],
    ) -> None:
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device=device,
            n_envs=n_envs,
            optimize_memory_usage=optimize_memory_usage,
            handle_timeout_termination=handle_timeout_termination,
            **options,
        )

    def _create_state(self) -> None:
        super()._create_state()
        arrays = {name: getattr(self, name) for name in _FIELDS}
        shapes = {name: (array.dtype, array.shape[1:]) for name, array in arrays.items()}
        self._fields = Fields(self.buffer_size, shapes, self._location)
        self._field_constants: tuple[int, ...] = ()
        self._show_fields()

    @property
    def device_bytes(self) -> int:
        return super().device_bytes + self._fields.copy.nbytes

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: npt.NDArray[Any],
        reward: npt.NDArray[Any],
        done: npt.NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        self._settle()
        pos = self.pos
        next_place = (0, (pos + 1) % self.buffer_size) if self.optimize_memory_usage else (1, pos)
        action = action.reshape(self.n_envs, self.action_dim)
        stores = self._device_stores
        steps = {key: store.checked_step([part_of(obs, key), part_of(next_obs, key)]) for key, store in stores.items()}
        for key, store in stores.items():
            store.make_room(steps[key])
        for key, store in stores.items():
            store.write_step([(0, pos), next_place], steps[key])
        rows = self._fields.rows
        rows["actions"][pos] = action
        rows["rewards"][pos] = reward
        rows["dones"][pos] = done
        if self.handle_timeout_termination:
            rows["timeouts"][pos] = [info.get("TimeLimit.truncated", False) for info in infos]
        self._fields.changes.note(pos)
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full = True
            self.pos = 0

    def _samples_at(
        self,
        batch_inds: npt.NDArray[np.int64],
        env_indices: npt.NDArray[np.int64],
        env: VecNormalize | None,
        last_inds: npt.NDArray[np.int64] | None = None,
    ) -> Any:
        if self._settled_for is not self.device:
            self._settle()
        assert last_inds is None, "there are no transitions of several steps here"
        following = (batch_inds + 1) % self.buffer_size if self.optimize_memory_usage else batch_inds
        columns = _ONE_COLUMN if self.optimize_memory_usage else _TWO_COLUMNS
        stores = self._device_stores
        with Outbox(self._location) as outbox:
            self._fields.flush(outbox)
            for store in stores.values():
                store.flush(outbox)
        places = Places([batch_inds, following], env_indices, self._location)
        only = stores.get(SINGLE)
        if only is not None and only.gathers_fields and env is None and self._outputs_stay:
            # Everything in one launch: the way that must be fast.
            fields = self._field_batch(len(batch_inds))
            obs, next_obs = only.read_tensors(columns, places, fields)
            actions, rewards, dones = self._fields_at(places) if fields is None else fields[1:4]
            return ReplayBufferSamples(obs, actions, next_obs, dones, rewards)
        # The first launch brings the fields along.
        with_fields = next((key for key, store in stores.items() if store.gathers_fields), None)
        fields = None if with_fields is None else self._field_batch(len(batch_inds))
        pairs = {
            key: store.read_tensors(columns, places, fields if key == with_fields else None)
            for key, store in stores.items()
        }
        actions, rewards, dones = self._fields_at(places) if fields is None else fields[1:4]
        if env is not None:
            rewards = normalize_reward(rewards, env)
        if SINGLE in pairs:
            obs, next_obs = (self._output(normalize_obs(found, env)) for found in pairs[SINGLE])
            return ReplayBufferSamples(obs, self._output(actions), next_obs, self._output(dones), self._output(rewards))
        all_obs, all_next_obs = (
            normalize_obs({key: pair[which] for key, pair in pairs.items()}, env) for which in (0, 1)
        )
        return DictReplayBufferSamples(
            observations={key: self._output(found) for key, found in all_obs.items()},
            actions=self._output(actions),
            next_observations={key: self._output(found) for key, found in all_next_obs.items()},
            dones=self._output(dones),
            rewards=self._output(rewards),
        )

    def _field_batch(self, n: int) -> FieldBatch | None:
        """Fields that a kernel will gather, if that can be done."""
        location, dtype = self._location, self._fields.tensor("actions").dtype
        if dtype.itemsize % 4:
            return None
        if not self._field_constants:
            words = self.action_dim * dtype.itemsize // 4
            offsets = [self._fields.offset(name) for name in _FIELDS]
            self._field_constants = (self._fields.dtype.itemsize // 4, words, 1 << (words - 1).bit_length(), *offsets)
        actions = batch_memory.empty((n, self.action_dim), dtype, location)
        rewards, dones = (batch_memory.empty((n, 1), th.float32, location) for _ in range(2))
        return FieldBatch(self._fields.tensor_of_words(), actions, rewards, dones, self._field_constants)

    def _fields_at(self, places: Places) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """Actions, rewards and dones, where no launch brings them along."""
        if uses_triton(self._location) and (batch := self._field_batch(len(places))) is not None:
            from sb3_extra_buffers.gpu_buffers.kernels.fields_triton import gather_fields

            gather_fields(places.for_kernels, len(places.slots), batch)
            return batch[1:4]
        fields, where = self._fields, (places.tensor[0], places.env_tensor)
        dones = fields.tensor("dones")[where] * (1 - fields.tensor("timeouts")[where])
        return fields.tensor("actions")[where], fields.tensor("rewards")[where][:, None], dones[:, None]

    def _settle(self) -> None:
        before = self._location
        super()._settle()
        if before != self._location:
            self._fields.to(self._location)

    def _restore_field(self, name: str, fields: SavedState) -> None:
        field = getattr(self, name)
        field[:] = fields.array(name, field.dtype, field.shape)

    def _show_fields(self) -> None:
        for name in _FIELDS:
            setattr(self, name, self._fields.array(name))

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in _FIELDS}
        return {**state, "_location": None, "_settled_for": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._show_fields()


class GpuDictReplayBuffer(GpuReplayBuffer, DictReplayBuffer):
    """The same for Dict observation spaces, each key stored on its own."""
