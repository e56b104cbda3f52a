"""The classes of learners, made from the algorithms of SB3."""

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
    """The class of a learner: ``algorithm`` with two arguments more, ``collectors`` and ``ray``.

    ``collectors`` is a dict:

    - ``n``: how many collectors there are, each in a process of its own (2).
    - ``envs``: how many environments each of them has (1).
    - ``make_env``: a function that returns an environment, or a ``VecEnv`` with ``envs`` of them. Not needed if ``env``
      is the name of an environment.
    - ``algorithm_kwargs``: arguments of the algorithm that are different for collectors, such as another exploration.
      Or a function that returns them for each collector, such as :func:`ape_x`.
    - ``buffer_kwargs``: options of the collectors' buffers, such as ``compression_method``.
    - ``actor_options``: options of ``ray.remote`` for collectors. By default, each takes one CPU of a cluster. On this
      machine, they share the CPUs.
    - ``in_process``: True runs the collectors in this process, one after the other, without Ray. For tests.

    For off-policy algorithms also:

    - ``segment_steps``: after how many steps a collector sends what it has collected (32).
    - ``ahead``: how many segments a collector may collect before the learner has consumed the first of them (2).
    - ``samples_per_insert``: how often a transition is sampled on average. By default, ``train_freq``,
      ``gradient_steps`` and ``batch_size`` decide, as without collectors.
    - ``sync_every``: after how many gradient steps collectors get new weights (100).

    ``ray`` has arguments for ``ray.init``, such as ``{"address": "auto"}``. Without an address, Ray is started on this
    machine. Without ``collectors``, the class is ``algorithm`` itself.
    """
    bases = getattr(algorithm, "__mro__", ())
    if OffPolicyAlgorithm in bases:
        return _learner_class(OffPolicyLearner, algorithm)
    # An algorithm that collects in its own way, such as RecurrentPPO, stores more than our rollouts have.
    if getattr(algorithm, "collect_rollouts", None) is OnPolicyAlgorithm.collect_rollouts:
        return _learner_class(OnPolicyLearner, algorithm)
    raise ConfigurationError(
        "distributed() is for off-policy algorithms of SB3, such as DQN and SAC, and for PPO, A2C and others that "
        f"collect rollouts as these do, not for {getattr(algorithm, '__name__', algorithm)!r}."
    )


@functools.cache
def _learner_class(learner: type[Learner], algorithm: type[BaseAlgorithm]) -> type[BaseAlgorithm]:
    name = f"Distributed{algorithm.__name__}"
    return type(name, (learner, algorithm), {"_algorithm": algorithm, "__doc__": algorithm.__doc__})


def ape_x(number: int, n: int) -> dict[str, float]:
    """For ``algorithm_kwargs`` of DQN: a constant exploration rate for each collector, from 0.4 down to 0.0007.

    As in https://arxiv.org/abs/1803.00933: some collectors explore far, and some follow the policy.
    """
    epsilon = 0.4 ** (1 + 7 * number / max(n - 1, 1))
    return {"exploration_initial_eps": epsilon, "exploration_final_eps": epsilon}
