"""Let a model play, and put what happens into buffers as SB3's own algorithms do."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer, RolloutBuffer
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv, VecMonitor, is_vecenv_wrapped, unwrap_vec_normalize

from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.recording.base import BaseRecordBuffer
from sb3_extra_buffers.recording.record_buffer import RecordBuffer

AnyBuffer = BaseBuffer | BaseRecordBuffer


class Step(NamedTuple):
    """One step of all environments."""

    seen: Any
    """What the model saw. Differs from ``obs`` where the environment normalizes observations."""
    obs: Any
    actions: npt.NDArray[Any]
    next_obs: Any
    """At the end of an episode the last observation of that episode, not the first of the next."""
    rewards: npt.NDArray[Any]
    seen_rewards: npt.NDArray[Any]
    """As the environment returned them, normalized if it does that."""
    episode_starts: npt.NDArray[np.bool_]
    dones: npt.NDArray[np.bool_]
    infos: list[dict[str, Any]]
    episodes: dict[int, float]
    """The return of every episode that ended, by environment. A lost life is not the end of an episode."""


class Player:
    """A model in an environment. ``model`` may be anything with SB3's ``predict``."""

    def __init__(self, env: VecEnv, model: Any, deterministic: bool) -> None:
        self.env = env
        self.model = model
        self.deterministic = deterministic
        self._normalizer = unwrap_vec_normalize(env)
        self._is_monitored = is_vecenv_wrapped(env, VecMonitor) or env.env_is_wrapped(Monitor)[0]
        self._returns = np.zeros(env.num_envs)
        self._starts = np.ones(env.num_envs, dtype=bool)
        self._state: Any = None
        self._seen: Any = env.reset()
        self.obs: Any = self._original(self._seen)

    def step(self) -> Step:
        actions, self._state = self.model.predict(
            self._seen, state=self._state, episode_start=self._starts, deterministic=self.deterministic
        )
        seen, seen_rewards, dones, infos = self.env.step(actions)
        obs: Any = self._original(seen)
        rewards = seen_rewards if self._normalizer is None else self._normalizer.get_original_reward()
        step = Step(
            seen=self._seen,
            obs=self.obs,
            actions=actions,
            next_obs=self._reached(obs, dones, infos),
            rewards=rewards,
            seen_rewards=seen_rewards,
            episode_starts=self._starts,
            dones=dones,
            infos=infos,
            episodes=self._ended(rewards, dones, infos),
        )
        self._seen, self.obs, self._starts = seen, obs, dones
        return step

    def _original(self, seen: Any) -> Any:
        return seen if self._normalizer is None else self._normalizer.get_original_obs()

    def _reached(self, obs: Any, dones: npt.NDArray[np.bool_], infos: list[dict[str, Any]]) -> Any:
        """Like ``obs``, but with the last observation of each episode that ended: environments reset by themselves."""
        ended = [i for i in np.flatnonzero(dones).tolist() if infos[i].get("terminal_observation") is not None]
        if not ended:
            return obs
        reached = deepcopy(obs)
        for i in ended:
            last = infos[i]["terminal_observation"]
            if self._normalizer is not None:
                last = self._normalizer.unnormalize_obs(last)
            if isinstance(reached, dict):
                for key in reached:
                    reached[key][i] = last[key]
            else:
                reached[i] = last
        return reached

    def _ended(
        self, rewards: npt.NDArray[Any], dones: npt.NDArray[np.bool_], infos: list[dict[str, Any]]
    ) -> dict[int, float]:
        self._returns += rewards
        ended = {i: float(self._returns[i]) for i in np.flatnonzero(dones).tolist()}
        self._returns[dones] = 0
        if self._is_monitored:  # Monitor is below the wrapper that calls a lost life an end, and knows better
            return {i: float(infos[i]["episode"]["r"]) for i in ended if "episode" in infos[i]}
        return ended


class Feeder(ABC):
    """Adds steps to one buffer, and notes how long that takes."""

    def __init__(self, buffer: Any, player: Player) -> None:
        self.buffer = buffer
        self.player = player
        self.seconds = 0.0
        self.n_envs = getattr(buffer, "n_envs", 1)
        if self.n_envs > player.env.num_envs:
            raise ConfigurationError(
                f"A buffer for {self.n_envs} environments cannot be filled by {player.env.num_envs} of them. "
                "Give both the same n_envs."
            )

    def feed(self, step: Step) -> None:
        arguments = self._arguments(step)
        if arguments is not None:
            began = time.perf_counter()
            self.buffer.add(*arguments)
            self.seconds += time.perf_counter() - began

    @property
    def is_full(self) -> bool:
        return bool(self.buffer.full)

    @property
    def capacity(self) -> int:
        """Steps of each environment that the buffer can hold."""
        return int(self.buffer.buffer_size)

    @abstractmethod
    def _arguments(self, step: Step) -> tuple[Any, ...] | None:
        """What to call ``add`` with, or ``None`` for not at all. Of too many environments, the first."""

    def _part(self, values: Any) -> Any:
        if isinstance(values, dict):
            return {key: value[: self.n_envs] for key, value in values.items()}
        return values[: self.n_envs]


class ReplayFeeder(Feeder):
    def _arguments(self, step: Step) -> tuple[Any, ...]:
        actions = step.actions
        space = self.buffer.action_space
        if isinstance(space, spaces.Box):  # off-policy algorithms store them scaled to [-1, 1]
            actions = 2.0 * ((actions - space.low) / (space.high - space.low)) - 1.0
        fields = (step.obs, step.next_obs, actions, step.rewards, step.dones, step.infos)
        return tuple(map(self._part, fields))


class RolloutFeeder(Feeder):
    """A rollout that is full is left as it is."""

    def __init__(self, buffer: Any, player: Player) -> None:
        super().__init__(buffer, player)
        self.policy = getattr(player.model, "policy", None)
        if not hasattr(self.policy, "evaluate_actions"):
            raise ConfigurationError(
                f"{type(buffer).__name__} also stores values and log probabilities, which a model of "
                f"{type(player.model).__name__} does not give: use one of PPO, A2C or the like."
            )

    def _arguments(self, step: Step) -> tuple[Any, ...] | None:
        if self.is_full:
            return None
        seen, actions, rewards = map(self._part, (step.seen, step.actions, step.seen_rewards))
        policy: Any = self.policy
        policy.set_training_mode(False)
        with th.no_grad():
            values, log_probs, _ = policy.evaluate_actions(
                policy.obs_to_tensor(seen)[0], th.as_tensor(actions, device=policy.device)
            )
            rewards = rewards.copy()
            for i in np.flatnonzero(step.dones[: self.n_envs]).tolist():
                info = step.infos[i]
                if info.get("TimeLimit.truncated", False) and info.get("terminal_observation") is not None:
                    last, _ = policy.obs_to_tensor(info["terminal_observation"])
                    rewards[i] += self.buffer.gamma * policy.predict_values(last)[0].item()
        if isinstance(self.buffer.action_space, spaces.Discrete):
            actions = actions.reshape(-1, 1)
        return seen, actions, rewards, self._part(step.episode_starts), values, log_probs


class RecordFeeder(Feeder):
    """Records the first environment: its observations where they fit the buffer's frames, else what it renders."""

    def __init__(self, buffer: Any, player: Player) -> None:
        super().__init__(buffer, player)
        self._frame = self._look()

    @property
    def is_full(self) -> bool:
        return isinstance(self.buffer, RecordBuffer) and len(self.buffer) == self.buffer.max_size

    @property
    def capacity(self) -> int:
        return self.buffer.max_size if isinstance(self.buffer, RecordBuffer) else 0

    def _arguments(self, step: Step) -> tuple[Any, ...]:
        frame, self._frame = self._frame, self._look()
        return frame, step.rewards[0], step.actions[0]

    def _look(self) -> Any:
        obs = self.player.obs
        if not isinstance(self.buffer, RecordBuffer) or not self.buffer.has_frames:
            return None
        if not isinstance(obs, dict) and self.buffer.fits(obs[0].shape):
            return obs[0].copy()
        return self.player.env.env_method("render", indices=0)[0]


def feeders_for(buffer: AnyBuffer | Iterable[AnyBuffer] | None, player: Player) -> list[Feeder]:
    """One feeder for each buffer."""
    buffers = [] if buffer is None else [buffer] if isinstance(buffer, BaseBuffer | BaseRecordBuffer) else list(buffer)
    kinds = ((ReplayBuffer, ReplayFeeder), (RolloutBuffer, RolloutFeeder), (BaseRecordBuffer, RecordFeeder))
    feeders: list[Feeder] = []
    for one in buffers:
        feeder = next((feeder for kind, feeder in kinds if isinstance(one, kind)), None)
        if feeder is None:
            raise ConfigurationError(
                f"A {type(one).__name__} is not a replay, rollout or record buffer. Pass one of these."
            )
        feeders.append(feeder(one, player))
    return feeders
