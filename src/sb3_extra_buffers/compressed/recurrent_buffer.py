"""Rollout buffers for sb3-contrib's RecurrentPPO, and a RecurrentPPO that uses them."""

from __future__ import annotations

from typing import Any, cast

import numpy.typing as npt
import torch as th
from gymnasium import spaces
from typing_extensions import Unpack

from sb3_extra_buffers.compressed.arguments import StorageOptions
from sb3_extra_buffers.compressed.rollout_buffer import CompressedDictRolloutBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.compressed.rows import on_host, row_of
from sb3_extra_buffers.errors import MissingPackageError

try:
    from sb3_contrib import RecurrentPPO
    from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
    from sb3_contrib.common.recurrent.type_aliases import RNNStates
except ImportError as error:
    raise MissingPackageError("A rollout buffer with recurrent states", "sb3-contrib", "contrib") from error


_STATES = ("hidden_states_pi", "cell_states_pi", "hidden_states_vf", "cell_states_vf")


class _Recurrent(CompressedRolloutBuffer):
    """Stores recurrent states. The base of both classes."""

    _saved_fields = (*CompressedRolloutBuffer._saved_fields, *_STATES)
    hidden_state_shape: tuple[int, int, int, int]

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        hidden_state_shape: tuple[int, int, int, int],
        device: th.device | str = "auto",
        gae_lambda: float = 1,
        gamma: float = 0.99,
        n_envs: int = 1,
        **options: Unpack[StorageOptions],
    ) -> None:
        of_contrib: dict[str, Any] = {"hidden_state_shape": hidden_state_shape}
        super().__init__(
            buffer_size, observation_space, action_space, device, gae_lambda, gamma, n_envs, **options, **of_contrib
        )

    def _extra_rows(  # type: ignore[override]  # contrib's add() requires lstm_states, too
        self, *, lstm_states: RNNStates, **unknown: Any
    ) -> dict[str, npt.NDArray[Any]]:
        states = zip(_STATES, (*lstm_states.pi, *lstm_states.vf), strict=True)
        rows = {name: row_of(getattr(self, name), on_host(state)) for name, state in states}
        return {**super()._extra_rows(**unknown), **rows}


# contrib's add() takes any *args.
class CompressedRecurrentRolloutBuffer(_Recurrent, RecurrentRolloutBuffer):  # type: ignore[misc]
    """contrib's ``RecurrentRolloutBuffer`` with compressed observations.

    Further arguments: see :class:`~sb3_extra_buffers.compressed.base.BaseCompressedBuffer`.
    """


class CompressedRecurrentDictRolloutBuffer(_Recurrent, CompressedDictRolloutBuffer, RecurrentDictRolloutBuffer):  # type: ignore[misc]
    """:class:`CompressedRecurrentRolloutBuffer` for Dict observation spaces. Each key is stored on its own."""


class CompressedRecurrentPPO(RecurrentPPO):
    """contrib's ``RecurrentPPO`` with a compressed rollout buffer. ``RecurrentPPO`` itself has no argument for that.

    :param rollout_buffer_kwargs: Arguments of the buffer, such as ``compression_method``.
    """

    def __init__(
        self,
        *args: Any,
        rollout_buffer_kwargs: dict[str, Any] | None = None,
        _init_setup_model: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **{**kwargs, "_init_setup_model": False})
        self.rollout_buffer_kwargs = dict(rollout_buffer_kwargs or {})
        if _init_setup_model:
            self._setup_model()

    def _setup_model(self) -> None:
        super()._setup_model()
        # RecurrentPPO has created its own buffer. Nobody has written to it, so it takes no resident memory.
        plain = cast(RecurrentRolloutBuffer, self.rollout_buffer)
        is_dict = isinstance(self.observation_space, spaces.Dict)
        self.rollout_buffer = (CompressedRecurrentDictRolloutBuffer if is_dict else CompressedRecurrentRolloutBuffer)(
            self.n_steps,
            self.observation_space,
            self.action_space,
            plain.hidden_state_shape,
            self.device,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            n_envs=self.n_envs,
            **self.rollout_buffer_kwargs,
        )
