"""Policies that play an environment: random actions, or the policy of a saved SB3 model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.vec_env import VecEnv

from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.measure.environments import describe


class RandomPolicy:
    """Samples random actions, with the ``predict`` method of an SB3 model."""

    def __init__(self, space: spaces.Space[Any], n_envs: int, seed: int) -> None:
        self.space = space
        self.n_envs = n_envs
        self._rng = np.random.default_rng(seed)
        space.seed(seed)

    def predict(self, observation: Any, **kwargs: Any) -> tuple[npt.NDArray[Any], None]:
        if isinstance(self.space, spaces.Discrete):
            return self._rng.integers(self.space.n, size=self.n_envs) + self.space.start, None
        return np.stack([self.space.sample() for _ in range(self.n_envs)]), None


def load_policy(path: Path, env: VecEnv) -> BasePolicy:
    """Load only the policy of a saved model, to play ``env``."""
    try:
        data, parameters, _ = load_from_zip_file(path, device="cpu")
        assert data is not None
        spaces_of_model = {name: data[name] for name in ("observation_space", "action_space")}
        sde = {"use_sde": True} if data.get("use_sde") else {}
        policy: BasePolicy = data["policy_class"](
            *spaces_of_model.values(), lr_schedule=lambda _: 0.0, **sde | data["policy_kwargs"]
        )
        policy.load_state_dict(parameters["policy"])  # type: ignore[arg-type]  # a dict of tensors
    except Exception as error:  # a file that is no model may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigurationError(
            f"Cannot load the policy in {str(path)!r} ({reason}). Pass a .zip file that an SB3 model saved. "
            'Models of sb3-contrib need: pip install "sb3-extra-buffers[contrib]"'
        ) from error
    for name, theirs in spaces_of_model.items():
        ours = getattr(env, name)
        if ours != theirs:
            raise ConfigurationError(
                f"The model {str(path)!r} was trained with the {name.replace('_', ' ')} {describe(theirs)}, but the "
                f"environment has {describe(ours)}. Use the same environment and --frame-stack as in its training."
            )
    return policy
