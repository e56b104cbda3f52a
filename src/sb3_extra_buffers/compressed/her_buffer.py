"""Hindsight experience replay."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.type_aliases import DictReplayBufferSamples
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from stable_baselines3.her import GoalSelectionStrategy, HerReplayBuffer
from typing_extensions import Unpack

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.compressed.arguments import StorageOptions
from sb3_extra_buffers.compressed.replay_buffer import CompressedDictReplayBuffer
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.state import DECODERS, ENCODERS, Json, SavedState, State

ENCODERS[GoalSelectionStrategy] = lambda strategy, where: {"$goals": strategy.name}
DECODERS["$goals"] = lambda name: GoalSelectionStrategy[name]


class _EpisodeChanges(NamedTuple):
    """How a step changes the index of episodes, which HER draws goals from."""

    overwritten: dict[int, Indices]
    """By environment, the slots of the complete episode that the step begins to overwrite."""
    starts: Indices
    """The slot where the current episode of each environment began."""
    infos: npt.NDArray[Any] | None
    """The info dicts of the step, with ``copy_info_dict`` only."""


class _HerBase(CompressedDictReplayBuffer):
    """Adds our options. Method resolution puts it between ``HerReplayBuffer`` and its base, ``DictReplayBuffer``."""

    _options: StorageOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, **self._options)

    def _reopen(self) -> None:
        """Do nothing yet: ``HerReplayBuffer`` has not created its own arrays."""


class CompressedHerReplayBuffer(HerReplayBuffer, _HerBase):
    """SB3's ``HerReplayBuffer`` with compressed observations: same arguments, same batches under the same seed.

    Further arguments: see :class:`~sb3_extra_buffers.compressed.base.BaseCompressedBuffer`.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        env: VecEnv | None,
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: GoalSelectionStrategy | str = "future",
        copy_info_dict: bool = False,
        **options: Unpack[StorageOptions],
    ) -> None:
        if optimize_memory_usage:
            raise ConfigurationError(
                "HER needs the last observation of every episode, which optimize_memory_usage does not keep. Leave it "
                "out: next observations share the memory of observations anyway."
            )
        self._options = options
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            env,  # type: ignore[arg-type]  # None until set_env(), as in loaded buffers of SB3
            device,
            n_envs,
            handle_timeout_termination=handle_timeout_termination,
            n_sampled_goal=n_sampled_goal,
            goal_selection_strategy=goal_selection_strategy,
            copy_info_dict=copy_info_dict,
        )
        del self._options
        if not self.copy_info_dict:
            self.infos = self.infos[:0].copy()  # SB3 creates a dict for every transition, but never uses it
        CompressedDictReplayBuffer._reopen(self)

    _saved_fields = (*_HerBase._saved_fields, "ep_start", "ep_length", "_current_ep_start")
    _rebuilt = ("env", "infos", "_changes")
    __getstate__ = _HerBase.__getstate__  # not HerReplayBuffer's

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.env = None  # until set_env(), as in SB3
        _HerBase.__setstate__(self, state)

    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), "env": None}

    def _state(self) -> State:
        state = dict(super()._state())
        if self.copy_info_dict:
            state["infos"] = Json(self.infos.tolist(), "infos")
        return state

    def _restore(self, state: SavedState) -> None:
        super()._restore(state)
        self._check_episodes(state)
        if self.copy_info_dict:
            self.infos = self._saved_infos(state, self.buffer_size)

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: list[dict[str, Any]]) -> None:
        # Not HerReplayBuffer's method, which changes episodes before the transition is checked.
        with self._lock.held:
            row = None
            if self.copy_info_dict:
                row = np.empty(self.n_envs, dtype=object)
                row[:] = infos
            self._changes = self._next_changes(row)
            _HerBase.add(self, obs, next_obs, action, reward, done, infos)

    def reset(self) -> None:
        # SB3's method keeps the old episodes: transitions that are gone would be sampled, and new lengths be wrong.
        with self._lock.held, uninterrupted():
            super().reset()
            self.ep_length[:] = 0
            self._current_ep_start[:] = 0

    def _commit(self, pos: int, *stored: Any) -> None:
        self._apply_changes(pos, self._changes)
        super()._commit(pos, *stored)
        self._close_episodes(self._field_rows("dones", np.array([pos]))[0])

    def _next_changes(self, infos: npt.NDArray[Any] | None) -> _EpisodeChanges:
        """Find how the next step changes the episodes. As in SB3, one whose first step is overwritten is removed."""
        pos = self.pos
        overwritten = {
            env: np.arange(pos, self.ep_start[pos, env] + self.ep_length[pos, env]) % self.buffer_size
            for env in np.flatnonzero(self.ep_length[pos] > 0).tolist()
        }
        return _EpisodeChanges(overwritten, self._current_ep_start.copy(), infos)

    def _apply_changes(self, pos: int, changes: _EpisodeChanges) -> None:
        """Add a step to the index of episodes before it is stored. Doing it twice does no harm."""
        for env, slots in changes.overwritten.items():
            self.ep_length[slots, env] = 0
        self._current_ep_start[:] = changes.starts
        self.ep_start[pos] = changes.starts
        if changes.infos is not None:
            self.infos[pos] = changes.infos

    def _begin_at(self, slot: int) -> None:
        super()._begin_at(slot)
        self._current_ep_start[:] = slot

    def _close_episodes(self, dones: npt.NDArray[Any]) -> None:
        for env in np.flatnonzero(dones).tolist():
            self._compute_episode_length(env)

    def _further_segment_state(self, slots: Indices, priorities: bool) -> State:
        return {"infos": Json(self.infos[slots].tolist(), "infos")} if self.copy_info_dict else {}

    def _checked_further_state(self, segment: SavedState, n_steps: int) -> Any:
        return self._saved_infos(segment, n_steps) if self.copy_info_dict else None

    def _saved_infos(self, state: SavedState, n_steps: int) -> npt.NDArray[Any]:
        infos = np.empty((n_steps, self.n_envs), dtype=object)
        infos[:] = state.json("infos")
        if not all(isinstance(info, dict) for info in infos.flat):
            raise state.error("infos", "must be dicts")
        return infos

    def _complete_steps(self, n_steps: int, rows: Mapping[str, npt.NDArray[Any]], further: Any) -> None:
        for number, dones in enumerate(rows["dones"]):
            self._apply_changes(self.pos, self._next_changes(None if further is None else further[number]))
            super()._complete_steps(1, rows, None)
            self._close_episodes(dones)

    def truncate_last_trajectory(self) -> None:
        # Not SB3's method, which accesses dones and timeouts and thereby unpacks them.
        with self._lock.held, uninterrupted():
            if (self._current_ep_start != self.pos).any():
                warnings.warn(
                    "The last trajectory in the replay buffer will be truncated. If the environment continues it, pass "
                    "truncate_last_traj=False to load_replay_buffer().",
                    stacklevel=2,
                )
                self._end_episodes()

    def _end_episodes(self) -> None:
        is_open = self._current_ep_start != self.pos
        if is_open.any():
            newest = np.array([self.pos - 1])
            rows = {name: self._field_rows(name, newest) for name in ("dones", "timeouts")}
            rows["dones"][0, is_open] = 1
            if self.handle_timeout_termination:  # as at a time limit: bootstrap from the next observation
                rows["timeouts"][0, is_open] = 1
            self._place_rows(newest, rows)
            self._close_episodes(is_open)

    def _check_episodes(self, state: SavedState) -> None:
        """Check that episodes contain their transitions and lie in the buffer: HER draws goals from them."""
        slots = np.arange(self.buffer_size)[:, None]
        within = (slots - self.ep_start) % self.buffer_size < self.ep_length
        in_buffer = (self.ep_start >= 0) & (self.ep_start < self.buffer_size) & (self.ep_length <= self.buffer_size)
        if not np.where(self.ep_length == 0, True, within & in_buffer).all() or (self.ep_length < 0).any():
            raise state.error("fields/ep_start", "does not agree with the lengths of episodes")
        if not ((self._current_ep_start >= 0) & (self._current_ep_start < self.buffer_size)).all():
            raise state.error("fields/_current_ep_start", "is not in the buffer")

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> DictReplayBufferSamples:  # type: ignore[override]
        self._check_folder()
        with self._lock.held:  # so that no episode is overwritten between drawing and reading it
            return super().sample(batch_size, env)

    def _get_real_samples(self, batch_indices: Indices, env_indices: Indices, env: VecNormalize | None = None) -> Any:
        # SB3 passes views of one array, but compiled code needs contiguous arrays.
        return self._samples_at(batch_indices.copy(), env_indices.copy(), env)

    def _get_virtual_samples(
        self, batch_indices: Indices, env_indices: Indices, env: VecNormalize | None = None
    ) -> Any:
        # Not SB3's method, which accesses dones and actions and thereby unpacks them.
        if self.env is None:
            raise ConfigurationError(
                "HER computes the rewards of new goals with the environment, but the buffer has none: call set_env()."
            )
        slots, envs = batch_indices.copy(), env_indices.copy()
        infos: Any = copy.deepcopy(self.infos[slots, envs]) if self.copy_info_dict else [{} for _ in slots]
        goals, wanted = self._raw_goals(slots, envs), [(0, slots), (1, slots)]
        raw = {
            key: [goals, goals] if key == "desired_goal" else store.read_raw(wanted, envs, self.device)
            for key, store in self._stores.items()
        }
        # The environment gets goals as it returned them, also if batches have normalized ones.
        (rewards,) = self.env.env_method("compute_reward", raw["achieved_goal"][1], goals, infos, indices=[0])
        pairs = {key: store.converted(raw[key]) for key, store in self._stores.items()}
        places = slots * self.n_envs + envs
        rewards = rewards.astype(np.float32).reshape(-1, 1)
        return self._batch_of(pairs, self._actions_at(places), self._dones_at(places), rewards, env)

    def _raw_goals(self, slots: Indices, envs: Indices) -> Any:
        """New goals, drawn by SB3's method, before any normalization."""
        columns = self.next_observations
        try:
            self.next_observations = {key: column.raw for key, column in columns.items()}
            return self._sample_goals(slots, envs)
        finally:
            self.next_observations = columns
