"""Buffer classes by name in hyperparameters of the RL Zoo.

The Zoo calls ``eval()`` on ``replay_buffer_class``, but knows only the names that it imports itself. It leaves
``rollout_buffer_class`` a string. Wrappers, callbacks and policies can be dotted names; here, buffer classes can, too.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from sb3_extra_buffers.errors import ConfigurationError, MissingPackageError

try:
    from rl_zoo3 import exp_manager
except ImportError as error:
    raise MissingPackageError("A hyperparameter file of the RL Zoo", "rl_zoo3", "zoo") from error

_DOTTED_NAME = re.compile(r"\w+(\.\w+)+")


class BufferExperimentManager(exp_manager.ExperimentManager):  # type: ignore[misc]  # it has no types
    """The Zoo's ``ExperimentManager``; ``replay_buffer_class`` and ``rollout_buffer_class`` may be dotted names.

    ``sb3-extra-buffers zoo train`` uses it. In a training script of your own, assign it before calling the Zoo's
    ``train()``: ``rl_zoo3.train.ExperimentManager = BufferExperimentManager``.
    """

    def _preprocess_hyperparams(self, hyperparams: dict[str, Any]) -> Any:
        for key in ("replay_buffer_class", "rollout_buffer_class"):
            if isinstance(hyperparams.get(key), str) and _DOTTED_NAME.fullmatch(hyperparams[key]):
                hyperparams[key] = _imported(hyperparams[key], key)
        if isinstance(hyperparams.get("rollout_buffer_kwargs"), str):  # as the Zoo does with replay_buffer_kwargs
            hyperparams["rollout_buffer_kwargs"] = eval(hyperparams["rollout_buffer_kwargs"], vars(exp_manager))
        return super()._preprocess_hyperparams(hyperparams)


def _imported(dotted_name: str, key: str) -> Any:
    module, _, name = dotted_name.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"{key}: {dotted_name!r} cannot be imported ({error}). "
            "Write module.Class, for example 'sb3_extra_buffers.CompressedReplayBuffer'."
        ) from error
