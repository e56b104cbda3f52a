"""Replay buffers for DQN, SAC, TD3 and their relatives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize
from typing_extensions import Unpack

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.compressed.arguments import StorageOptions
from sb3_extra_buffers.compressed.conversion import Conversions
from sb3_extra_buffers.compressed.drawing import draw, draw_places
from sb3_extra_buffers.compressed.packed_fields import PackedFields
from sb3_extra_buffers.compressed.rows import SINGLE, row_of
from sb3_extra_buffers.errors import ConfigurationError, EmptyBufferError

_FLOAT, _BOOL = np.dtype(np.float32), np.dtype(np.bool_)
"""The usual dtypes of rewards and dones, which can be stored without a conversion."""
_TIMEOUT = "TimeLimit.truncated"


class CompressedReplayBuffer(PackedFields, Conversions, ReplayBuffer):
    """SB3's ``ReplayBuffer`` with compressed observations: same arguments, same batches under the same seed.

    Equal observations share their memory, so ``optimize_memory_usage`` saves next to nothing. It is accepted because it
    changes which transitions are sampled, as in SB3.

    Further arguments: see :class:`~sb3_extra_buffers.compressed.base.BaseCompressedBuffer`.
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
        **options: Unpack[StorageOptions],
    ) -> None:
        if optimize_memory_usage and handle_timeout_termination:
            raise ConfigurationError(
                "optimize_memory_usage=True and handle_timeout_termination=True do not go together, as in SB3. "
                "Leave out optimize_memory_usage: next observations share the memory of observations anyway."
            )
        self._n_columns = 1 if optimize_memory_usage else 2
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device=device,
            n_envs=n_envs,
            handle_timeout_termination=handle_timeout_termination,
            **options,
        )

    def _create_state(self) -> None:
        super()._create_state()
        self._row_shape = (self.n_envs,)
        self.optimize_memory_usage = self._n_columns == 1  # not passed to SB3's constructor
        self.observations = self._column(0)
        self.next_observations = self._column(0, shift=1) if self.optimize_memory_usage else self._column(1)

    _saved_fields: ClassVar[tuple[str, ...]] = ("actions", "rewards", "dones", "timeouts")
    _segment_fields = _saved_fields  # not those that derived classes add
    _rebuilt: ClassVar[tuple[str, ...]] = ("next_observations",)

    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), "buffer_size": self.buffer_size * self.n_envs}

    def _restore_pickle_of_dev0(self, attributes: dict[str, Any]) -> None:
        super()._restore_pickle_of_dev0(attributes)
        self._row_shape = (self.n_envs,)

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: list[dict[str, Any]]) -> None:
        # Not SB3's method, which copies every observation twice before it reaches the store. This one checks all
        # values, stores frames that no slot refers to yet, and then makes the step visible, which cannot fail.
        with self._lock.held:
            if self._folder is not None:
                self._folder.before_adding(self)
            pos, shape, staged = self.pos, self._row_shape, []
            for key, store in self._stores.items():
                pair = store.checked_pair(obs[key], next_obs[key]) if key else store.checked_pair(obs, next_obs)
                staged.append((store, pair))
            action = np.asarray(action).reshape(self._action_shape)
            if action.dtype is not self._action_dtype:
                action = row_of(self._field_rows("actions", np.arange(0)), action)
            if type(reward) is not np.ndarray or reward.dtype is not _FLOAT or reward.shape != shape:
                reward = row_of(self.rewards, reward)
            if type(done) is not np.ndarray or done.dtype is not _BOOL or done.shape != shape:
                done = row_of(self.rewards, done)
            timeouts = self._timeouts_of(infos) if self.handle_timeout_termination else None
            is_flag = timeouts is None and done.dtype is _BOOL and self._flags is not None  # as in nearly all steps
            flags = done if is_flag else self._flags_or_arrays(done, 0.0 if timeouts is None else timeouts)
            row = self._bytes_or_array(action), reward, flags
            staged = [(store, store.stage(pos, pair)) for store, pair in staged]
            try:
                self._commit(pos, staged, row)
            except BaseException:  # Ctrl-C: complete the transition before it is raised
                self._commit(pos, staged, row)
                raise
            self._n_added += 1
            for store, _ in staged:
                store.finish_step()

    def _commit(self, pos: int, staged: list[tuple[Any, Any]], row: Any) -> None:
        """Make the staged transition visible in slot ``pos``, and advance. Doing it twice does no harm."""
        for store, step in staged:
            store.place_step(pos, step)
        action, self.rewards[pos], flags = row
        if self._action_bytes is not None:
            first = pos * len(action)
            self._action_bytes.data[first : first + len(action)] = action
        else:
            self.__dict__["actions"][pos] = action
        if self._flags is not None:
            self._flags[pos] = flags
        else:
            self.dones[pos], self.timeouts[pos] = flags
        if pos + 1 == self.buffer_size:
            self.full = True
            self.pos = 0
        else:
            self.pos = pos + 1

    def _timeouts_of(self, infos: list[dict[str, Any]]) -> npt.NDArray[Any] | None:
        try:
            of_envs = infos if type(infos) is list else [*infos]
            for info in of_envs:
                if info.get(_TIMEOUT, False):
                    break
            else:
                if len(of_envs) == self.n_envs:  # in nearly all steps
                    return None
            timeouts = [info.get(_TIMEOUT, False) for info in of_envs]
        except AttributeError as error:
            raise ConfigurationError(
                f"infos must be a list with a dict for each environment, not {type(infos).__name__}: {infos!r:.80}. "
                "Gymnasium's vector environments have one dict for all: pass [{'TimeLimit.truncated': ...}, ...], or "
                "create the buffer with handle_timeout_termination=False."
            ) from error
        return row_of(self.rewards, timeouts)

    def reset(self) -> None:
        with self._lock.held:
            super().reset()
            self._exported = None
            if self._received is not None:
                self._received.pos = 0

    def _end_episodes(self) -> None:
        if self.size():
            newest = np.array([self.pos - 1])
            rows = {name: self._field_rows(name, newest) for name in ("dones", "timeouts")}
            if self.optimize_memory_usage:
                rows["dones"][:] = 1  # as in SB3: the next step overwrites the next observation
            else:
                # As at a time limit: n-step returns end here, and bootstrap from the next observation.
                rows["timeouts"] = np.maximum(rows["timeouts"], 1 - rows["dones"])
            self._place_rows(newest, rows)

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> ReplayBufferSamples:
        self._check_folder()
        if self.size() == 0:
            raise EmptyBufferError("The buffer is empty: add transitions before sampling from it.")
        with self._lock.held:  # so that no transition is overwritten between drawing and reading it
            if not has_library_get_samples(self):
                return ReplayBuffer.sample(self, batch_size, env)  # draws slots, and calls the user's method
            found: ReplayBufferSamples = self._samples_at(*draw_places(self, batch_size), env)
            return found

    def _get_samples(self, batch_inds: Indices, env: VecNormalize | None = None) -> Any:
        return self._samples_at(batch_inds, draw(self.n_envs, len(batch_inds)), env)

    def _samples_at(
        self, slots: Indices, envs: Indices, env: VecNormalize | None, last_slots: Indices | None = None
    ) -> Any:
        """The transitions at these slots and environments. Decodes observations and next observations together.

        :param last_slots: For n-step returns: the slots of the last steps, whose next observations and dones are used.
        """
        last_slots = slots if last_slots is None else last_slots
        # take() with one index is several times faster than [] with two.
        places = slots * self.n_envs + envs
        last_places = places if last_slots is slots else last_slots * self.n_envs + envs
        following = (0, (last_slots + 1) % self.buffer_size) if self.optimize_memory_usage else (1, last_slots)
        with self._lock.held:
            pairs = {key: store.read([(0, slots), following], envs, self.device) for key, store in self._stores.items()}
            dones = self._dones_at(last_places)
            rewards = self.rewards.reshape(-1, 1).take(places, axis=0)
            actions = self._actions_at(places)
        return self._batch_of(pairs, actions, dones, rewards, env)

    def _batch_of(
        self, pairs: Mapping[str, Any], actions: Any, dones: Any, rewards: Any, env: VecNormalize | None
    ) -> ReplayBufferSamples | DictReplayBufferSamples:
        """A batch as tensors. ``pairs`` has the observations and next observations of each store."""
        is_dict = SINGLE not in pairs
        obs, next_obs = ({key: pair[i] for key, pair in pairs.items()} for i in (0, 1)) if is_dict else pairs[SINGLE]
        rewards = self._normalize_reward(rewards, env)
        return (DictReplayBufferSamples if is_dict else ReplayBufferSamples)(
            observations=self._tensors(obs, env),
            actions=self.to_torch(actions, copy=False),
            next_observations=self._tensors(next_obs, env),
            dones=self.to_torch(dones, copy=False),
            rewards=self.to_torch(rewards, copy=False),
        )

    def _tensors(self, observations: Any, env: VecNormalize | None) -> Any:
        """An array or a dict of arrays as tensors."""
        normalized = self._normalize_obs(observations, env)
        if isinstance(normalized, dict):
            return {key: self.to_torch(array) for key, array in normalized.items()}
        return self.to_torch(normalized)


_LIBRARY_GET_SAMPLES = CompressedReplayBuffer._get_samples


def has_library_get_samples(buffer: CompressedReplayBuffer) -> bool:
    """Whether ``_get_samples``, which SB3's ``sample`` calls, is this library's. Users may override it."""
    return getattr(buffer._get_samples, "__func__", None) is _LIBRARY_GET_SAMPLES


class CompressedDictReplayBuffer(CompressedReplayBuffer, DictReplayBuffer):
    """:class:`CompressedReplayBuffer` for Dict observation spaces. SB3's does not allow ``optimize_memory_usage``."""

    if TYPE_CHECKING:

        def sample(self, batch_size: int, env: VecNormalize | None = None) -> DictReplayBufferSamples: ...  # type: ignore[override]  # as in SB3
