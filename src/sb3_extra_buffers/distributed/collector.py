"""A collector: environments, a copy of the policy, and a small buffer whose steps it sends as segments."""

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
    """The arguments for creating a collector in any process."""

    algorithm: type[BaseAlgorithm]
    arguments: dict[str, Any]
    """The algorithm's arguments, except ``env``. They specify a small buffer that can export segments."""
    different: list[dict[str, Any]]
    """For each collector, its own arguments, which override ``arguments``."""
    make_env: MakeEnv
    n_envs: int
    n_steps: int
    """The steps of a segment or rollout."""


class Request(NamedTuple):
    """A request for one segment."""

    num_timesteps: int
    """Steps of all collectors so far, for ``learning_starts`` and the exploration schedule."""
    total_timesteps: int
    version: int
    """The version of the newest weights."""


class Collector:
    """Collects one segment at a time, with SB3's ``collect_rollouts``."""

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
            warnings.simplefilter("ignore")  # they are about training, which a collector does not do
            self.model = plan.algorithm(env=env, **arguments)
        if self.model._vec_normalize_env is not None and not isinstance(self.model, OnPolicyAlgorithm):
            raise ConfigurationError(
                "make_env returned a VecNormalize, whose statistics the learner does not have: it would train on "
                "observations and rewards that are not normalized. Normalize them in a wrapper of single environments."
            )
        self.version = -1
        self._recorder = _EpisodeRecorder()
        _, self._callback = self.model._setup_learn(1, self._recorder)
        self._callback.on_training_start({}, {})

    def collect(self, request: Request, weights: Weights | None) -> npt.NDArray[np.uint8]:
        """Run the environments for one segment, and return it.

        :param weights: The newest weights, or ``None`` if this collector has them already.
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
        self._recorder.episodes = []
        self._recorder.n_steps = 0
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
            extra={"episodes": self._recorder.episodes},
        )
        return np.frombuffer(segment, dtype=np.uint8)

    def _set_priorities(self, buffer: CompressedPrioritizedReplayBuffer) -> None:
        """Set the priorities of the newest steps from TD errors, computed with this collector's weights.

        At the end of the segment, n-step returns have fewer steps, because the following steps are not collected yet.
        """
        slots = (buffer.pos + np.arange(-self.plan.n_steps, 0)) % buffer.buffer_size
        indices = (slots[:, None] * buffer.n_envs + np.arange(buffer.n_envs)).reshape(-1)
        samples = buffer._samples_at(*np.divmod(indices, buffer.n_envs), None)
        batch = PrioritizedReplayBufferSamples._make([*samples, None, indices])
        buffer.update_priorities(indices, self.model.td_errors(batch))  # type: ignore[attr-defined]  # checked before

    def close(self) -> None:
        if self.model.env is not None:
            self.model.env.close()


class _EpisodeRecorder(BaseCallback):
    """Records the ends of episodes, for the learner's statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.episodes: list[list[Any]] = []
        self.n_steps = 0

    def _on_step(self) -> bool:
        for env, (info, done) in enumerate(zip(self.locals["infos"], self.locals["dones"], strict=True)):
            if done:
                episode = {key: float(info["episode"][key]) for key in _EPISODE_KEYS} if "episode" in info else None
                success = float(info["is_success"]) if "is_success" in info else None
                # At a time limit, on-policy algorithms add the value of the terminal observation to the reward in the
                # buffer. Callbacks get the reward without it.
                reward = float(self.locals["rewards"][env])
                self.episodes.append([self.n_steps, env, reward, episode, success])
        self.n_steps += 1
        return True


def _make_vec_env(plan: CollectorPlan) -> VecEnv:
    made = plan.make_env()
    if isinstance(made, VecEnv):
        if made.num_envs != plan.n_envs:
            raise ConfigurationError(
                f"make_env returned a VecEnv of {made.num_envs} environments, but collectors have envs={plan.n_envs}. "
                "Make both equal."
            )
        return made
    envs: list[Any] = [made, *(plan.make_env() for _ in range(plan.n_envs - 1))]
    # Monitor provides the statistics of episodes. SB3 adds it to its environments as well.
    monitored = [env if is_wrapped(env, Monitor) else Monitor(env) for env in envs]
    return DummyVecEnv([partial(monitored.pop, 0)] * plan.n_envs)


_TRAINING_NETWORKS = ("q_net_target", "quantile_net_target", "actor_target", "critic", "critic_target")
"""Names of the networks with which no off-policy algorithm acts: in DQN, QR-DQN, and algorithms with an actor."""


def weights_of(model: BaseAlgorithm) -> Weights:
    """The parameters that a collector needs to act."""
    unused = () if isinstance(model, OnPolicyAlgorithm) else _TRAINING_NETWORKS
    state = model.policy.state_dict().items()
    return {name: value.detach().cpu().numpy() for name, value in state if name.partition(".")[0] not in unused}


def load_weights(model: BaseAlgorithm, weights: Weights) -> None:
    own = model.policy.state_dict()
    with th.no_grad():
        for name, value in weights.items():
            own[name].copy_(th.from_numpy(np.array(value)))
            # Initial priorities also need the target network. Using these weights for it avoids sending its own.
            if (target := own.get(name.replace("q_net.", "q_net_target.", 1))) is not None:
                target.copy_(own[name])
