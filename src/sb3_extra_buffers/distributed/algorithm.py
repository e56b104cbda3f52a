"""Make learner classes from SB3's algorithms."""

from __future__ import annotations

import functools
from typing import Any

from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from sb3_extra_buffers.distributed.learner import Learner
from sb3_extra_buffers.distributed.off_policy import OffPolicyLearner
from sb3_extra_buffers.distributed.on_policy import OnPolicyLearner
from sb3_extra_buffers.errors import ConfigurationError


def distributed(algorithm: type[BaseAlgorithm]) -> Any:
    """Return a subclass of ``algorithm`` with two more arguments, ``collectors`` and ``ray``.

    ``collectors`` is a dict with these options (defaults in parentheses):

    - ``n``: number of collectors, each in its own process (2).
    - ``envs``: environments of each collector (1).
    - ``make_env``: a function that returns an environment, or a ``VecEnv`` with ``envs`` of them. Not needed if ``env``
      is a Gymnasium id.
    - ``algorithm_kwargs``: arguments of the algorithm that differ for collectors, for example for exploration. Either a
      dict, or a function ``(number of the collector, n)`` that returns one, such as :func:`ape_x`.
    - ``buffer_kwargs``: options of the collectors' buffers, such as ``compression_method``.
    - ``actor_options``: options of ``ray.remote`` for collectors. By default, each reserves one CPU of a cluster. If
      Ray is started on this machine, collectors share its CPUs.
    - ``in_process``: ``True`` runs the collectors in this process, one after the other, without Ray. For tests.

    For off-policy algorithms also:

    - ``segment_steps``: steps of each segment that a collector sends (32).
    - ``ahead``: segments that a collector may collect before the learner has consumed the first of them (2).
    - ``samples_per_insert``: how many times a transition is sampled on average. By default, ``train_freq``,
      ``gradient_steps`` and ``batch_size`` determine it, as without collectors.
    - ``sync_every``: gradient steps between two updates of the collectors' weights (100).

    ``ray`` is a dict of arguments for ``ray.init``, such as ``{"address": "auto"}``. Without an address, Ray is started
    on this machine. If ``collectors`` is not given, the class behaves like ``algorithm``.
    """
    bases = getattr(algorithm, "__mro__", ())
    if OffPolicyAlgorithm in bases:
        return _learner_class(OffPolicyLearner, algorithm)
    # Algorithms with their own collect_rollouts, such as RecurrentPPO, store more fields than CompressedRolloutBuffer.
    if getattr(algorithm, "collect_rollouts", None) is OnPolicyAlgorithm.collect_rollouts:
        return _learner_class(OnPolicyLearner, algorithm)
    raise ConfigurationError(
        "distributed() supports SB3's off-policy algorithms, such as DQN and SAC, and PPO, A2C and others that use "
        f"their collect_rollouts(), but not {getattr(algorithm, '__name__', algorithm)!r}."
    )


@functools.cache
def _learner_class(learner: type[Learner], algorithm: type[BaseAlgorithm]) -> type[BaseAlgorithm]:
    name = f"Distributed{algorithm.__name__}"
    return type(name, (learner, algorithm), {"_algorithm": algorithm, "__doc__": algorithm.__doc__})


def ape_x(number: int, n: int) -> dict[str, float]:
    """Exploration as in `Ape-X <https://arxiv.org/abs/1803.00933>`_, for ``algorithm_kwargs`` of DQN.

    Each collector has a constant exploration rate, from 0.4 for the first to 0.0007 for the last.
    """
    epsilon = 0.4 ** (1 + 7 * number / max(n - 1, 1))
    return {"exploration_initial_eps": epsilon, "exploration_final_eps": epsilon}
