"""Whoever asks for n-step returns gets them, or an error."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from gymnasium import spaces
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.her import HerReplayBuffer

from sb3_extra_buffers.errors import ConfigurationError


def check_n_steps(buffer: object, observation_space: spaces.Space[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse ``n_steps`` that ``buffer``, created with ``kwargs``, would not give: its own argument or its algorithm's.

    ``DQN(n_steps=3, replay_buffer_class=...)`` would train on single steps: SB3 tells a buffer class that it is given
    nothing about ``n_steps``. SB3 2.9 warns of that, 2.7 does not.
    """
    algorithm = _calling_algorithm()
    wanted = getattr(algorithm, "n_steps", 1)
    if isinstance(buffer, NStepReplayBuffer):
        if wanted not in (1, kwargs.get("n_steps")):
            raise ConfigurationError(
                f"{type(algorithm).__name__} was given n_steps={wanted}, its {type(buffer).__name__} n_steps="
                f"{kwargs.get('n_steps')}. The buffer is what counts: use {_arguments(algorithm, wanted)}."
            )
    elif wanted > 1 or "n_steps" in kwargs:
        wanted = kwargs.get("n_steps", wanted)
        if isinstance(buffer, HerReplayBuffer):
            raise ConfigurationError(
                f"{type(buffer).__name__} has no n-step returns, but n_steps={wanted} was given. Leave n_steps out."
            )
        name = f"Compressed{'Dict' if isinstance(observation_space, spaces.Dict) else ''}NStepReplayBuffer"
        raise ConfigurationError(
            f"{type(buffer).__name__} has no n-step returns, but n_steps={wanted} was given. "
            f"Use replay_buffer_class={name} with {_arguments(algorithm, wanted)}."
        )


def _calling_algorithm() -> OffPolicyAlgorithm | None:
    """The algorithm that is being set up. It does not introduce itself to its buffer, so look who is calling."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        caller = frame.f_locals.get("self") if frame.f_code.co_name == "_setup_model" else None
        if isinstance(caller, OffPolicyAlgorithm):
            return caller
    return None


def _arguments(algorithm: OffPolicyAlgorithm | None, n_steps: int) -> str:
    gamma = algorithm.gamma if algorithm is not None else "..."
    return f'replay_buffer_kwargs={{"n_steps": {n_steps}, "gamma": {gamma}}}'
