"""Run a model in an environment, and add the transitions to buffers as SB3's algorithms do."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv, VecMonitor, is_vecenv_wrapped, unwrap_vec_normalize
from stable_baselines3.her import HerReplayBuffer

from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from sb3_extra_buffers.compressed.rows import map_parts, parts_at
from sb3_extra_buffers.distributed.buffer import ShardedReplayBuffer
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.recording.record_buffer import BaseRecordBuffer, RecordBuffer

AnyBuffer = ReplayBuffer | BaseRecordBuffer


class Transition(NamedTuple):
    """The arguments of ``ReplayBuffer.add``, one row per environment; observations are arrays, or dicts of arrays.

    Observations and rewards are not normalized by ``VecNormalize``: SB3's replay buffers store the original values. At
    the end of an episode, ``next_obs`` is its terminal observation, not the first one of the next episode.
    """

    obs: Any
    next_obs: Any
    action: npt.NDArray[Any]
    reward: npt.NDArray[Any]
    done: npt.NDArray[np.bool_]
    infos: list[dict[str, Any]]


class Collector:
    """Plays an environment with a model, and adds every step to buffers. ``model`` only needs SB3's ``predict``."""

    def __init__(
        self,
        env: VecEnv,
        model: Any,
        deterministic: bool,
        buffer: AnyBuffer | Iterable[AnyBuffer] | None = None,
    ) -> None:
        self.env = env
        self.model = model
        self.deterministic = deterministic
        self.episode_returns: dict[int, float] = {}
        """The return of each episode that ended in the last step, by environment. A lost life does not end one."""
        self._normalizer = unwrap_vec_normalize(env)
        self._is_monitored = is_vecenv_wrapped(env, VecMonitor) or env.env_is_wrapped(Monitor)[0]
        self._returns = np.zeros(env.num_envs)
        self._episode_starts = np.ones(env.num_envs, dtype=bool)
        self._state: Any = None
        self._policy_obs: Any = env.reset()  # what the model sees: normalized, if the environment is
        self.obs: Any = self._original_obs()
        buffers = buffer if isinstance(buffer, Iterable) and not isinstance(buffer, BaseRecordBuffer) else [buffer]
        self.writers = [_writer_for(one, self) for one in buffers if one is not None]
        self.add_seconds = [0.0] * len(self.writers)
        """The time spent in ``add`` of each buffer."""

    def step(self) -> Transition:
        actions, self._state = self.model.predict(
            self._policy_obs, state=self._state, episode_start=self._episode_starts, deterministic=self.deterministic
        )
        obs = self.obs
        self._policy_obs, rewards, dones, infos = self.env.step(actions)
        self.obs = self._original_obs()
        if self._normalizer is not None:
            rewards = self._normalizer.get_original_reward()
        transition = Transition(obs, self._with_terminal_obs(dones, infos), actions, rewards, dones, infos)
        self.episode_returns = self._ended_returns(rewards, dones, infos)
        self._episode_starts = dones
        for i, writer in enumerate(self.writers):
            arguments = writer.arguments(transition)
            start = time.perf_counter()
            writer.buffer.add(*arguments)
            self.add_seconds[i] += time.perf_counter() - start
        return transition

    def _original_obs(self) -> Any:
        return self._policy_obs if self._normalizer is None else self._normalizer.get_original_obs()

    def _with_terminal_obs(self, dones: npt.NDArray[np.bool_], infos: list[dict[str, Any]]) -> Any:
        """The new observations; for environments that were reset, the last observation before the reset."""
        ended = [i for i in np.flatnonzero(dones).tolist() if infos[i].get("terminal_observation") is not None]
        if not ended:
            return self.obs
        next_obs = deepcopy(self.obs)
        for i in ended:
            terminal = infos[i]["terminal_observation"]
            if self._normalizer is not None:
                terminal = self._normalizer.unnormalize_obs(terminal)
            map_parts(lambda rows, row, i=i: rows.__setitem__(i, row), next_obs, terminal)
        return next_obs

    def _ended_returns(
        self, rewards: npt.NDArray[Any], dones: npt.NDArray[np.bool_], infos: list[dict[str, Any]]
    ) -> dict[int, float]:
        self._returns += rewards
        ended = {i: float(self._returns[i]) for i in np.flatnonzero(dones).tolist()}
        self._returns[dones] = 0
        if self._is_monitored:  # Monitor is inside the wrapper that ends an episode at each lost life
            return {i: float(infos[i]["episode"]["r"]) for i in ended if "episode" in infos[i]}
        return ended


class ReplayWriter:
    """Fills a replay buffer. A buffer for fewer environments stores the first ones."""

    def __init__(self, buffer: ReplayBuffer, collector: Collector) -> None:
        self.buffer = buffer
        self.capacity = buffer.buffer_size  # steps of each environment
        if buffer.n_envs > collector.env.num_envs:
            raise ConfigurationError(
                f"The buffer is for {buffer.n_envs} environments, but there are only {collector.env.num_envs}. "
                "Give both the same n_envs."
            )

    @property
    def is_full(self) -> bool:
        return self.buffer.full

    def arguments(self, transition: Transition) -> tuple[Any, ...]:
        """The arguments of ``add``."""
        space = self.buffer.action_space
        if isinstance(space, spaces.Box):  # off-policy algorithms store actions scaled to [-1, 1]
            scaled = 2.0 * ((transition.action - space.low) / (space.high - space.low)) - 1.0
            transition = transition._replace(action=scaled)
        return tuple(parts_at(values, slice(self.buffer.n_envs)) for values in transition)


class RecordWriter:
    """Records the first environment: its observations if they fit the buffer's frames, else what it renders."""

    def __init__(self, buffer: BaseRecordBuffer, collector: Collector) -> None:
        self.buffer = buffer
        self.capacity = buffer.max_size if isinstance(buffer, RecordBuffer) else 0
        self._collector = collector
        self._frame = self._current_frame()

    @property
    def is_full(self) -> bool:
        return len(self.buffer) == self.capacity

    def arguments(self, transition: Transition) -> tuple[Any, ...]:
        frame, self._frame = self._frame, self._current_frame()
        return frame, transition.reward[0], transition.action[0]

    def _current_frame(self) -> Any:
        obs = self._collector.obs
        if not isinstance(self.buffer, RecordBuffer) or not self.buffer.has_frames:
            return None
        if not isinstance(obs, dict) and self.buffer.fits(obs[0].shape):
            return obs[0].copy()
        return self._collector.env.env_method("render", indices=0)[0]


def _writer_for(buffer: AnyBuffer, collector: Collector) -> ReplayWriter | RecordWriter:
    if isinstance(buffer, ReplayBuffer):
        return ReplayWriter(buffer, collector)
    if isinstance(buffer, BaseRecordBuffer):
        return RecordWriter(buffer, collector)
    raise ConfigurationError(
        f"A {type(buffer).__name__} cannot be filled: pass a replay buffer or a record buffer. On-policy algorithms "
        "fill their rollout buffers themselves."
    )


def end_episodes(buffer: Any) -> None:
    """Mark the running episodes as ended, because the next transitions belong to other episodes.

    Without this, n-step returns and HER would run on into the next episode. With ``optimize_memory_usage``, the first
    observation of an episode would become the next observation of the previous transition.
    """
    optimizes = getattr(buffer, "optimize_memory_usage", False)
    kind = buffer.part_class if isinstance(buffer, ShardedReplayBuffer) else type(buffer)
    if not optimizes and not issubclass(kind, NStepReplayBuffer | HerReplayBuffer):
        return
    newest = buffer.pos - 1
    if isinstance(buffer, BaseCompressedBuffer | ShardedReplayBuffer):
        buffer._end_episodes()
    elif isinstance(buffer, HerReplayBuffer):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that it truncates, which is what we want
            buffer.truncate_last_trajectory()
    elif optimizes:
        buffer.dones[newest] = 1
    else:
        buffer.timeouts[newest] = np.logical_or(buffer.timeouts[newest], np.logical_not(buffer.dones[newest]))
