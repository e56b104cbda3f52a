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

from sb3_extra_buffers.compressed.replay_buffer import CompressedReplayBuffer
from sb3_extra_buffers.compressed.rows import SINGLE, on_host
from sb3_extra_buffers.gpu_buffers.base import BaseGpuBuffer, GpuOptions, part_of
from sb3_extra_buffers.gpu_buffers.checking import check_same
from sb3_extra_buffers.gpu_buffers.device_store import DeviceStore
from sb3_extra_buffers.gpu_buffers.fields import Fields, field_property
from sb3_extra_buffers.gpu_buffers.kernels import uses_triton
from sb3_extra_buffers.gpu_buffers.kernels.batch import FieldBatch
from sb3_extra_buffers.gpu_buffers.normalization import normalize_obs, normalize_reward
from sb3_extra_buffers.gpu_buffers.places import Places
from sb3_extra_buffers.gpu_buffers.transfer import Outbox, upload
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.state import SavedState

_ONE_COLUMN, _TWO_COLUMNS = [0, 0], [0, 1]
_FIELDS = ("actions", "rewards", "dones", "timeouts")


class GpuReplayBuffer(BaseGpuBuffer, CompressedReplayBuffer):
    """SB3's ``ReplayBuffer`` on a torch device: same arguments, same batches under the same seed.

    Observations are compressed on the host and rebuilt on the device. Actions, rewards, dones and timeouts are there as
    well, so that sampling sends nothing but the places of the transitions.

    Further arguments: see :class:`~sb3_extra_buffers.gpu_buffers.base.BaseGpuBuffer`.
    """

    actions = field_property("actions")
    rewards = field_property("rewards")
    dones = field_property("dones")
    timeouts = field_property("timeouts")

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
        arrays = {name: self.__dict__.pop(name) for name in _FIELDS}
        shapes = {name: (array.dtype, array.shape[1:]) for name, array in arrays.items()}
        self._fields = Fields(self.buffer_size, shapes, self._location)
        self._field_constants: tuple[int, ...] = ()

    @property
    def device_bytes(self) -> int:
        return super().device_bytes + self._fields.copy.nbytes

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: list[dict[str, Any]]) -> None:
        if th.is_inference_mode_enabled():
            with th.inference_mode(mode=False):
                self.add(obs, next_obs, action, reward, done, infos)
            return
        with self._lock.held, uninterrupted():
            self._settle()
            self._follow_stream()
            self._prepare_fields(action, reward, done, infos)
            stores = self._device_stores
            step = [
                (store, store.checked_step([part_of(obs, key), part_of(next_obs, key)]))
                for key, store in stores.items()
            ]
            if self._last_stream is not None:
                self._keep(step)
            for store, pair in step:
                store.make_room(pair)
            pos = self.pos
            try:
                self._write_all(pos, step)
            except BaseException:
                # Once more, since it does no harm: a transition is there as a whole, or not at all.
                for store, pair in step:
                    store.make_room(pair)
                self._write_all(pos, step)
                raise

    def _prepare_fields(self, action: Any, reward: Any, done: Any, infos: list[dict[str, Any]]) -> None:
        """The fields of a transition, cast and broadcast as by SB3."""
        prepared = self._fields.prepared
        prepared["actions"][...] = _as_array(action).reshape(self.n_envs, self.action_dim)
        prepared["rewards"][...] = _as_array(reward)
        prepared["dones"][...] = _as_array(done)
        if self.handle_timeout_termination:
            prepared["timeouts"][...] = np.array([info.get("TimeLimit.truncated", False) for info in infos])

    def _write_all(self, pos: int, step: list[tuple[DeviceStore, list[Any]]]) -> None:
        """Store a transition, for which there is room."""
        next_place = (0, (pos + 1) % self.buffer_size) if self.optimize_memory_usage else (1, pos)
        for store, pair in step:
            store.write_step([(0, pos), next_place], pair)
        self._fields.write(pos)
        if pos + 1 == self.buffer_size:
            self.full = True
        self.pos = (pos + 1) % self.buffer_size

    def _samples_at(
        self,
        batch_inds: npt.NDArray[np.int64],
        env_indices: npt.NDArray[np.int64],
        env: VecNormalize | None,
        last_inds: npt.NDArray[np.int64] | None = None,
    ) -> Any:
        if th.is_inference_mode_enabled():
            with th.inference_mode(mode=False):
                return self._samples_at(batch_inds, env_indices, env, last_inds)
        with self._lock.held:
            return self._samples_now(batch_inds, env_indices, env, last_inds)

    def _samples_now(
        self,
        batch_inds: npt.NDArray[np.int64],
        env_indices: npt.NDArray[np.int64],
        env: VecNormalize | None,
        last_inds: npt.NDArray[np.int64] | None,
    ) -> Any:
        if self._settled_for is not self.device:
            self._settle()
        self._follow_stream()
        assert last_inds is None, "there are no transitions of several steps here"
        following = (batch_inds + 1) % self.buffer_size if self.optimize_memory_usage else batch_inds
        columns = _ONE_COLUMN if self.optimize_memory_usage else _TWO_COLUMNS
        stores = self._device_stores
        if self._fields.changes.count or any(store.has_changed for store in stores.values()):
            with uninterrupted(), Outbox(self._location) as outbox:
                self._fields.flush(outbox)
                for store in stores.values():
                    store.flush(outbox)
        places = Places([batch_inds, following], env_indices, self._location, self._host_blocks)
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
        if dtype.itemsize % 4 or self._fields.are_shared:
            return None
        if not self._field_constants:
            words = self.action_dim * dtype.itemsize // 4
            offsets = [self._fields.offset(name) for name in _FIELDS]
            self._field_constants = (self._fields.dtype.itemsize // 4, words, 1 << (words - 1).bit_length(), *offsets)
        actions = th.empty((n, self.action_dim), dtype=dtype, device=location)
        rewards = th.empty((n, 1), dtype=th.float32, device=location)
        dones = th.empty_like(rewards)
        return FieldBatch(self._fields.tensor_of_words(), actions, rewards, dones, self._field_constants)

    def _fields_at(self, places: Places) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """Actions, rewards and dones, where no launch brings them along."""
        if uses_triton(self._location) and (batch := self._field_batch(len(places))) is not None:
            from sb3_extra_buffers.gpu_buffers.kernels.fields_triton import gather_fields

            gather_fields(places.for_kernels, len(places.slots), batch)
            return batch[1:4]
        if self._fields.are_shared:
            return self._fields_on_host(places)
        fields, where = self._fields, (places.tensor[0], places.env_tensor)
        dones = fields.tensor("dones")[where] * (1 - fields.tensor("timeouts")[where])
        return fields.tensor("actions")[where], fields.tensor("rewards")[where][:, None], dones[:, None]

    def _fields_on_host(self, places: Places) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """The same from arrays that others may be writing to, as SB3 does it."""
        actions, rewards, dones, timeouts = (self._fields.read(name, places.slots[0], places.envs) for name in _FIELDS)
        arrays = actions, rewards[:, None], (dones * (1 - timeouts))[:, None]
        return tuple(upload(array, self._location) for array in arrays)  # type: ignore[return-value]

    def _move_fields(self, location: th.device) -> None:
        if "_fields" in self.__dict__:
            self._fields.to(location)

    def _device_tensors(self) -> list[th.Tensor]:
        return [*super()._device_tensors(), self._fields.copy]

    @property
    def _field_bytes(self) -> int:
        return self._fields.rows.nbytes

    def _restore_field(self, name: str, fields: SavedState) -> None:
        field = getattr(self, name)
        field[:] = fields.array(name, field.dtype, field.shape)

    def check(self) -> None:
        super().check()
        self.check_device()

    def check_device(self) -> None:
        with self._lock.held:
            super().check_device()
            if not self._fields.changes.count and not self._fields.are_shared:
                rows = self._fields.rows.view(np.uint8).reshape(self.buffer_size, -1)
                check_same("actions, rewards, dones or timeouts", self._fields.copy.cpu().numpy(), rows)


class GpuDictReplayBuffer(GpuReplayBuffer, DictReplayBuffer):
    """The same for Dict observation spaces, each key stored on its own."""

    if TYPE_CHECKING:

        def sample(self, batch_size: int, env: VecNormalize | None = None) -> DictReplayBufferSamples: ...  # type: ignore[override]  # as in SB3


def _as_array(values: Any) -> npt.NDArray[Any]:
    return values if type(values) is np.ndarray else np.array(on_host(values))
