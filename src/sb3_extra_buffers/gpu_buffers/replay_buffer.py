"""Replay buffers on a torch device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.buffers import DictReplayBuffer
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers.compressed.drawing import draw_places
from sb3_extra_buffers.compressed.replay_buffer import CompressedReplayBuffer, has_library_get_samples
from sb3_extra_buffers.compressed.rows import SINGLE, on_host, part_of
from sb3_extra_buffers.gpu_buffers.base import BaseGpuBuffer, normal_tensors
from sb3_extra_buffers.gpu_buffers.device_store import DeviceStore, Step
from sb3_extra_buffers.gpu_buffers.fields import FIELDS, Fields, field_property
from sb3_extra_buffers.gpu_buffers.kernels import kernel_module
from sb3_extra_buffers.gpu_buffers.normalization import normalize_obs, normalize_reward
from sb3_extra_buffers.gpu_buffers.transfer import Places
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.state import SavedState
from sb3_extra_buffers.storage.usage import MemoryUsage

_TIMEOUT = "TimeLimit.truncated"
_ONE_COLUMN, _TWO_COLUMNS = [0, 0], [0, 1]
"""The columns of observations and next observations. With ``optimize_memory_usage``, both are in column 0."""


class GpuReplayBuffer(BaseGpuBuffer, CompressedReplayBuffer):
    """SB3's ``ReplayBuffer`` on a torch device: same arguments, same batches under the same seed.

    Observations are compressed and rebuilt on the device. Actions, rewards, dones and timeouts are on the device as
    well, so sampling only sends the slots and environments of the batch.

    Further arguments: see :class:`~sb3_extra_buffers.gpu_buffers.base.BaseGpuBuffer`.
    """

    actions = field_property("actions")
    rewards = field_property("rewards")
    dones = field_property("dones")
    timeouts = field_property("timeouts")

    def _create_state(self) -> None:
        super()._create_state()
        arrays = {name: self.__dict__.pop(name) for name in FIELDS}
        shapes = {name: (array.dtype, array.shape[1:]) for name, array in arrays.items()}
        self._fields = Fields(self.buffer_size, shapes, self._location)

    def memory_usage(self) -> MemoryUsage:
        usage = super().memory_usage()  # only counts arrays that are attributes of the buffer
        fields = round(self.size() / self.buffer_size * self._field_bytes)
        return replace(usage, fields=usage.fields + fields, raw_equivalent=usage.raw_equivalent + fields)

    @property
    def _field_bytes(self) -> int:
        return self._fields.rows.nbytes

    def add(
        self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: list[dict[str, Any]] | dict[str, Any]
    ) -> None:
        """Store a transition of each environment, as SB3 does. All arguments may be tensors.

        :param infos: SB3's list of dicts; or one dict of arrays or tensors with a value per environment, as
            environments on a device return it.
        """
        with self._lock.held, uninterrupted(), normal_tensors():
            self._follow_device()
            tensors = self._field_tensors(action, reward, done, infos)
            if tensors is None:
                self._prepare_fields(action, reward, done, infos)
            pos, steps = self.pos, self._prepared_steps(obs, next_obs)
            try:
                self._commit(pos, steps, tensors)
            except BaseException:
                # Try once more: a transition is stored as a whole or not at all, and storing it twice does no harm.
                self._commit(pos, self._prepared_steps(obs, next_obs), tensors)
                raise

    def _prepared_steps(self, obs: Any, next_obs: Any) -> list[tuple[DeviceStore, Step]]:
        """Check the observations, send them to the device, and make room for them in every store."""
        stream, stores = self._last_stream, self._stores
        steps = [
            (store, store.checked_step((part_of(obs, key), part_of(next_obs, key)), stream))
            for key, store in stores.items()
        ]
        for store in stores.values():
            store.prepare(2, self.pos)
        return steps

    def _field_tensors(self, action: Any, reward: Any, done: Any, infos: Any) -> dict[str, th.Tensor] | None:
        """Return the fields of a transition if all are tensors on the device and can stay there; otherwise ``None``."""
        if not isinstance(reward, th.Tensor):
            return None
        fields = {"actions": action, "rewards": reward, "dones": done}
        if self.handle_timeout_termination:
            fields["timeouts"] = infos.get(_TIMEOUT) if isinstance(infos, dict) else None
        if not self._fields.accepts(fields.values()):
            return None
        shapes = dict.fromkeys(fields, (self.n_envs,)) | {"actions": (self.n_envs, self.action_dim)}
        return {name: tensor.detach().reshape(shapes[name]) for name, tensor in fields.items()}

    def _prepare_fields(self, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Put the fields of a transition into ``Fields.prepared``, cast and broadcast as SB3 does it."""
        prepared = self._fields.prepared
        prepared["actions"][...] = _as_array(action).reshape(self.n_envs, self.action_dim)
        prepared["rewards"][...] = _as_array(reward)
        prepared["dones"][...] = _as_array(done)
        if self.handle_timeout_termination:
            if isinstance(infos, dict):
                prepared["timeouts"][...] = _as_array(infos.get(_TIMEOUT, False))
            else:
                prepared["timeouts"][...] = np.array([info.get(_TIMEOUT, False) for info in infos])

    def _commit(self, pos: int, steps: list[tuple[DeviceStore, Step]], tensors: dict[str, th.Tensor] | None) -> None:
        """Store a transition after :meth:`_prepared_steps` has made room for it.

        :param tensors: Its fields on the device; ``None`` if they are in ``Fields.prepared``.
        """
        next_place = (0, (pos + 1) % self.buffer_size) if self.optimize_memory_usage else (1, pos)
        fields = self._fields.row_for(pos) if steps[0][0].takes_fields and tensors is None else None
        for i, (store, step) in enumerate(steps):
            store.write_step([(0, pos), next_place], step, None if i else fields)
        if tensors is None:
            self._fields.write(pos, is_sent=fields is not None)
        else:
            self._fields.write_tensors(pos, tensors)
        if pos + 1 == self.buffer_size:
            self.full = True
        self.pos = (pos + 1) % self.buffer_size

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> ReplayBufferSamples:
        with self._lock.held:  # so that no transition is overwritten between drawing and reading it
            if self.size() == 0 or not has_library_get_samples(self):
                return super().sample(batch_size, env)
            found: ReplayBufferSamples = self._samples_at(*draw_places(self, batch_size), env)
            return found

    def _samples_at(
        self,
        batch_inds: npt.NDArray[np.int64],
        env_indices: npt.NDArray[np.int64],
        env: VecNormalize | None,
        last_inds: npt.NDArray[np.int64] | None = None,
    ) -> Any:
        assert last_inds is None, "there are no transitions of several steps here"
        with self._lock.held, normal_tensors():
            self._follow_device()
            columns, slots = _TWO_COLUMNS, [batch_inds]
            if self.optimize_memory_usage:
                columns, slots = _ONE_COLUMN, [batch_inds, (batch_inds + 1) % self.buffer_size]
            pairs, (actions, rewards, dones) = self._gathered(columns, self._places(slots, env_indices))
            if env is not None:
                rewards = normalize_reward(rewards, env)
            is_dict = SINGLE not in pairs
            obs: Any
            next_obs: Any
            obs, next_obs = (
                ({key: pair[i] for key, pair in pairs.items()} for i in (0, 1)) if is_dict else pairs[SINGLE]
            )
            if env is not None:
                obs, next_obs = normalize_obs(obs, env), normalize_obs(next_obs, env)
            if not self._outputs_stay:
                obs, actions, next_obs, dones, rewards = map(self._to_device, (obs, actions, next_obs, dones, rewards))
        return (DictReplayBufferSamples if is_dict else ReplayBufferSamples)(obs, actions, next_obs, dones, rewards)

    def _gathered(self, columns: list[int], places: Places) -> tuple[dict[str, list[th.Tensor]], Sequence[th.Tensor]]:
        """Gather the observations of each store and column at ``places``, and actions, rewards and dones."""
        fields = self._fields.batch(places.n)
        # The first launch that can do so also gathers the fields.
        left, found = fields, {}
        for key, store in self._stores.items():
            found[key] = store.read_tensors(columns, places, left if store.gathers_fields else None)
            left = None if store.gathers_fields else left
        if left is not None and places.n:
            kernel_module("gather").gather_fields(places, left)
        return found, self._fields.from_host(places.slots[0], places.envs) if fields is None else fields[1:4]

    def _move_fields(self, location: th.device) -> None:
        if "_fields" in self.__dict__:
            self._fields.to(location)

    def _device_tensors(self) -> list[th.Tensor]:
        return [*super()._device_tensors(), *self._fields.device_tensors()]

    def _restore_field(self, name: str, fields: SavedState) -> None:
        field = getattr(self, name)
        field[:] = fields.array(name, field.dtype, field.shape)

    def check(self) -> None:
        with self._lock.held:
            super().check()
            self._fields.check()

    def check_device(self) -> None:
        with self._lock.held:
            super().check_device()
            self._fields.check()


class GpuDictReplayBuffer(GpuReplayBuffer, DictReplayBuffer):
    """:class:`GpuReplayBuffer` for Dict observation spaces, with a store for each key."""

    if TYPE_CHECKING:

        def sample(self, batch_size: int, env: VecNormalize | None = None) -> DictReplayBufferSamples: ...  # type: ignore[override]  # as in SB3


def _as_array(values: Any) -> npt.NDArray[Any]:
    return values if type(values) is np.ndarray else np.array(on_host(values))
