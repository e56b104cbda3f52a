"""Environments that run on a torch device, such as those of ManiSkill, Isaac Lab or Brax, and their ``VecEnv``.

:class:`DeviceEnv` is the interface of such an environment. :class:`DeviceVecEnv` turns it into an ordinary ``VecEnv``,
which copies to the host, for all of SB3. Algorithms made by
:func:`~sb3_extra_buffers.training_utils.device_loop.on_device` step it without copies.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv

from sb3_extra_buffers.compressed.rows import map_parts, parts_at
from sb3_extra_buffers.errors import ConfigurationError, ObservationError

Observations = Any
"""A tensor, or a dict of tensors, with one row per environment."""


class DeviceStep(NamedTuple):
    """What a step of all environments returns, on their device."""

    obs: Observations
    """For an environment whose episode has ended, the first observation of its next episode."""
    rewards: th.Tensor
    terminated: th.Tensor
    truncated: th.Tensor
    """Whether the episode was ended by a time limit."""
    final_obs: Observations
    """The observations that the actions led to, before any environment was reset."""


class DeviceEnv(Protocol):
    """Environments that step together on a torch device and reset by themselves when an episode ends."""

    num_envs: int
    observation_space: spaces.Space[Any]
    """The space of one environment. Images must be channels first."""
    action_space: spaces.Space[Any]
    device: th.device

    def reset(self, seed: int | None = None) -> Observations:
        """Start a new episode in all environments."""
        ...

    def step(self, actions: th.Tensor) -> DeviceStep:
        """Perform one action in each environment."""
        ...


class TrackedStep(NamedTuple):
    """A step, together with the statistics of the episodes that it ended."""

    step: DeviceStep
    dones: th.Tensor
    summary: th.Tensor
    """``float32``, (4, environments): done, truncated, and return and length of the episode so far."""


class DeviceVecEnv(VecEnv):
    """A :class:`DeviceEnv` as a ``VecEnv``.

    ``reset`` and ``step`` exchange NumPy arrays, as SB3 expects. Episodes are reported as ``Monitor`` reports them.
    ``reset_tensors`` and ``step_tensors`` do the same without leaving the device.
    """

    def __init__(self, env: DeviceEnv) -> None:
        for name in ("num_envs", "observation_space", "action_space", "device", "reset", "step"):
            if not hasattr(env, name):
                raise ConfigurationError(
                    f"A {type(env).__name__} has no {name!r}. Pass environments on a device: see DeviceEnv."
                )
        self.env = env
        self.device = th.device(env.device)
        self._actions: Any = None
        self._began = time.time()
        super().__init__(env.num_envs, env.observation_space, env.action_space)
        self._returns = th.zeros(self.num_envs, device=self.device)
        self._lengths = th.zeros(self.num_envs, device=self.device)

    def reset_tensors(self) -> Observations:
        """Reset all environments, with the seed that :meth:`seed` was given."""
        obs = self.env.reset(self._seeds[0])
        self._reset_seeds()
        self._returns = th.zeros_like(self._returns)
        self._lengths = th.zeros_like(self._lengths)
        self._check(obs)
        return obs

    def step_tensors(self, actions: th.Tensor) -> TrackedStep:
        """Perform actions that are on the device. The host does not wait for the device."""
        step = self.env.step(actions)
        self._check(step.obs)
        dones = step.terminated | step.truncated
        self._returns = self._returns + step.rewards
        self._lengths = self._lengths + 1
        timeouts = step.truncated & ~step.terminated
        summary = th.stack([dones.float(), timeouts.float(), self._returns, self._lengths])
        self._returns = self._returns.masked_fill(dones, 0)
        self._lengths = self._lengths.masked_fill(dones, 0)
        return TrackedStep(step, dones, summary)

    def episodes(self, summary: npt.NDArray[np.float32]) -> dict[int, dict[str, float]]:
        """Return what ``Monitor`` would report about the episodes that ended in a step, by environment.

        :param summary: :attr:`TrackedStep.summary`, on the host.
        """
        seconds = round(time.time() - self._began, 6)
        return {
            i: {"r": float(summary[2, i]), "l": int(summary[3, i]), "t": seconds}
            for i in np.flatnonzero(summary[0]).tolist()
        }

    def _check(self, obs: Observations) -> None:
        parts = obs if isinstance(obs, dict) else {"": obs}
        found = self.observation_space
        wanted: dict[str, Any] = dict(found.spaces) if isinstance(found, spaces.Dict) else {"": found}
        for key, space in wanted.items():
            part, shape = parts.get(key), (self.num_envs, *space.shape)
            if not isinstance(part, th.Tensor) or part.shape != shape:
                given = tuple(part.shape) if isinstance(part, th.Tensor) else type(part)
                raise ObservationError(f"Observations{key and f' {key!r}'} must be tensors of {shape}, not {given}.")
            if part.device.type != self.device.type:
                raise ObservationError(f"Observations are on {part.device}, but the device is {self.device}.")

    # For SB3

    def reset(self) -> Any:
        return map_parts(to_array, self.reset_tensors())

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        self._actions = actions

    def step_wait(self) -> Any:
        tracked = self.step_tensors(th.as_tensor(self._actions, device=self.device))
        summary = to_array(tracked.summary)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for i, episode in self.episodes(summary).items():
            infos[i]["episode"] = episode
            infos[i]["terminal_observation"] = map_parts(to_array, parts_at(tracked.step.final_obs, i))
            infos[i]["TimeLimit.truncated"] = bool(summary[1, i])
        rewards = to_array(tracked.step.rewards.float())
        return map_parts(to_array, tracked.step.obs), rewards, summary[0].astype(bool), infos

    def close(self) -> None:
        close = getattr(self.env, "close", None)
        if close is not None:
            close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        if attr_name == "render_mode" and not hasattr(self.env, "render_mode"):
            return [None] * self.num_envs
        return [getattr(self.env, attr_name)] * len(self._get_indices(indices))  # type: ignore[arg-type]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        setattr(self.env, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError(f"Cannot call {method_name!r} on single environments: they only step together.")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """There are no wrappers, but episodes are reported as ``Monitor`` reports them."""
        return [wrapper_class is Monitor] * len(self._get_indices(indices))  # type: ignore[arg-type]


def to_array(tensor: th.Tensor) -> npt.NDArray[Any]:
    """A copy in host memory."""
    return tensor.detach().cpu().numpy().copy()
