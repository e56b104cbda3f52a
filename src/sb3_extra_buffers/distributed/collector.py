"""A collector: environments, a copy of the policy, and a small compressed buffer whose steps it sends as segments."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_extra_buffers.compressed.prioritized_buffer import (
    CompressedPrioritizedReplayBuffer,
    PrioritizedReplayBufferSamples,
)
from sb3_extra_buffers.errors import ConfigurationError

Weights = dict[str, npt.NDArray[Any]]
MakeEnv = Callable[[], gym.Env[Any, Any] | VecEnv]

_EPISODE_KEYS = ("r", "l", "t")


class CollectorPlan(NamedTuple):
    """All that is needed to create a collector, in any process."""

    algorithm: type[BaseAlgorithm]
    arguments: dict[str, Any]
    """Of the algorithm, without its environment. Its buffer is a small one that can export segments."""
    different: list[dict[str, Any]]
    """For each collector, arguments that only it has."""
    make_env: MakeEnv
    n_envs: int
    n_steps: int
    """Of a segment, or of a rollout."""


class Request(NamedTuple):
    """What the learner asks for: one segment."""

    num_timesteps: int
    """Of all collectors so far: decides on random actions at the beginning, and on exploration."""
    total_timesteps: int
    version: int
    """Of the newest weights."""


class Collector:
    """Collects one segment at a time with SB3's own code."""

    def __init__(self, plan: CollectorPlan, index: int, seed: int | None) -> None:
        self.plan, self.index = plan, index
        env = _make_vec_env(plan)
        arguments = {
            **copy.deepcopy({**plan.arguments, **plan.different[index]}),
            "seed": seed,
            "device": "cpu",
            "verbose": 0,
            "tensorboard_log": None,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those that concern training, which does not happen here
            self.model = plan.algorithm(env=env, **arguments)
        self.version = -1
        self._steps = _Steps()
        _, self._callback = self.model._setup_learn(1, self._steps)
        self._callback.on_training_start({}, {})

    def collect(self, request: Request, weights: Weights | None) -> npt.NDArray[np.uint8]:
        """Run the environments for the steps of one segment.

        :param weights: The newest, or ``None`` if this collector has them already.
        """
        model: Any = self.model
        plan = self.plan
        if weights is not None:
            load_weights(model, weights)
            self.version = request.version
        model.num_timesteps, model._total_timesteps = request.num_timesteps, request.total_timesteps
        model._update_current_progress_remaining(request.num_timesteps, request.total_timesteps)
        if hasattr(model, "exploration_schedule"):
            model.exploration_rate = model.exploration_schedule(model._current_progress_remaining)
        self._steps.episodes = []
        self._steps.n_steps = 0
        if isinstance(self.model, OnPolicyAlgorithm):
            buffer: Any = model.rollout_buffer
            model.collect_rollouts(model.env, self._callback, buffer, plan.n_steps)
        else:
            buffer = model.replay_buffer
            steps = TrainFreq(plan.n_steps, TrainFrequencyUnit.STEP)
            model.collect_rollouts(
                model.env, self._callback, steps, buffer, model.action_noise, model.learning_starts, None
            )
        has_priorities = hasattr(model, "td_errors") and isinstance(buffer, CompressedPrioritizedReplayBuffer)
        if has_priorities:
            self._set_priorities(buffer)
        segment = buffer.export_segment(
            priorities=has_priorities,
            policy_version=max(self.version, 0),
            extra={"episodes": self._steps.episodes},
        )
        return np.frombuffer(segment, dtype=np.uint8)

    def _set_priorities(self, buffer: CompressedPrioritizedReplayBuffer) -> None:
        """Compute the TD errors of the newest steps with the weights of this collector.

        At the end of the segment, n-step returns are shorter, because their last steps are still to come.
        """
        slots = (buffer.pos + np.arange(-self.plan.n_steps, 0)) % buffer.buffer_size
        indices = (slots[:, None] * buffer.n_envs + np.arange(buffer.n_envs)).reshape(-1)
        samples = buffer._samples_at(*np.divmod(indices, buffer.n_envs), None)
        batch = PrioritizedReplayBufferSamples._make([*samples, None, indices])
        buffer.update_priorities(indices, self.model.td_errors(batch))  # type: ignore[attr-defined]  # asked before

    def close(self) -> None:
        if self.model.env is not None:
            self.model.env.close()


class _Steps(BaseCallback):
    """Remembers which episodes have ended, for the learner's statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.episodes: list[list[Any]] = []
        self.n_steps = 0

    def _on_step(self) -> bool:
        for env, (info, done) in enumerate(zip(self.locals["infos"], self.locals["dones"], strict=True)):
            if done:
                episode = {key: float(info["episode"][key]) for key in _EPISODE_KEYS} if "episode" in info else None
                success = float(info["is_success"]) if "is_success" in info else None
                # On-policy algorithms add the value of what would have followed to the last reward.
                reward = float(self.locals["rewards"][env])
                self.episodes.append([self.n_steps, env, reward, episode, success])
        self.n_steps += 1
        return True


def _make_vec_env(plan: CollectorPlan) -> VecEnv:
    made = plan.make_env()
    if isinstance(made, VecEnv):
        if made.num_envs != plan.n_envs:
            raise ConfigurationError(
                f"make_env has returned a VecEnv of {made.num_envs} environments, but collectors have "
                f"envs={plan.n_envs}."
            )
        return made
    envs: list[Any] = [made, *(plan.make_env() for _ in range(plan.n_envs - 1))]
    # The statistics of episodes come from Monitor, as SB3 adds it to environments of its own.
    monitored = [env if is_wrapped(env, Monitor) else Monitor(env) for env in envs]
    return DummyVecEnv([partial(monitored.pop, 0)] * plan.n_envs)


_ACTING = ("q_net", "quantile_net", "actor")
"""The networks that choose actions, in the algorithms that this is for."""


def weights_of(model: BaseAlgorithm) -> Weights:
    """The parameters that a collector needs to act."""
    state = model.policy.state_dict()
    acting = {name: value for name, value in state.items() if name.split(".", maxsplit=1)[0] in _ACTING}
    return {name: value.detach().cpu().numpy() for name, value in (acting or state).items()}


def load_weights(model: BaseAlgorithm, weights: Weights) -> None:
    own = model.policy.state_dict()
    with th.no_grad():
        for name, value in weights.items():
            own[name].copy_(th.from_numpy(np.array(value)))
            # Only for first priorities: it saves sending the target network, too.
            if (target := own.get(name.replace("q_net.", "q_net_target.", 1))) is not None:
                target.copy_(own[name])
