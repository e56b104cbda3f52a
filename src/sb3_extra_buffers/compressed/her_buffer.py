"""Hindsight experience replay."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from stable_baselines3.common.vec_env import VecNormalize
from stable_baselines3.her import HerReplayBuffer

from sb3_extra_buffers.compressed.replay_buffer import CompressedDictReplayBuffer
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.persistence.plain import decode, encode

if TYPE_CHECKING:
    from sb3_extra_buffers.persistence.state import SavedState, State


class _BehindHer(CompressedDictReplayBuffer):
    """What ``HerReplayBuffer`` takes for ``DictReplayBuffer``. Arguments that it does not know come here past it."""

    _storage_arguments: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("optimize_memory_usage"):
            raise ConfigurationError(
                "HER needs the last observation of every episode, which optimize_memory_usage does not keep. Leave it "
                "out: next observations share the memory of observations anyway."
            )
        if self._storage_arguments.get("prefetch"):
            raise ConfigurationError(
                "prefetch=True is not for CompressedHerReplayBuffer, whose goals are drawn when it is sampled. "
                "Leave it out."
            )
        super().__init__(*args, **{**kwargs, **self._storage_arguments})


# SB3's classes disagree in the same way: HerReplayBuffer only takes dicts.
class CompressedHerReplayBuffer(HerReplayBuffer, _BehindHer):  # type: ignore[misc]
    """SB3's ``HerReplayBuffer`` with compressed observations: same arguments, same batches under the same seed.

    Further arguments: see :class:`~sb3_extra_buffers.compressed.base.BaseCompressedBuffer`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        known = inspect.signature(HerReplayBuffer).parameters
        self._storage_arguments = {name: kwargs.pop(name) for name in kwargs.keys() - known}
        super().__init__(*args, **kwargs)
        del self._storage_arguments
        if not self.copy_info_dict:
            self.infos = self.infos[:0].copy()  # a dict for every transition that nobody will ask for

    _saved_fields = (*_BehindHer._saved_fields, "ep_start", "ep_length", "_current_ep_start")

    def _arguments(self) -> dict[str, Any]:
        arguments = {
            **super()._arguments(),
            "env": None,
            "n_sampled_goal": self.n_sampled_goal,
            "goal_selection_strategy": self.goal_selection_strategy,
            "copy_info_dict": self.copy_info_dict,
        }
        del arguments["prefetch"]
        return arguments

    def _state(self) -> State:
        state = dict(super()._state())
        if self.copy_info_dict:
            infos = encode(self.infos.tolist(), "infos")
            state["infos"] = np.frombuffer(json.dumps(infos).encode(), dtype=np.uint8)
        return state

    def _restore(self, state: SavedState) -> None:
        super()._restore(state)
        self._check_episodes(state)
        if self.copy_info_dict:
            infos = decode(json.loads(state.array("infos", np.uint8, (None,)).tobytes()))
            self.infos[:] = np.array(infos, dtype=object).reshape(self.infos.shape)
            if not all(isinstance(info, dict) for info in self.infos.flat):
                raise state.error("infos", "must be dicts")

    def _check_episodes(self, state: SavedState) -> None:
        """Every transition of an episode lies within it, and it within the buffer. Goals are drawn from there."""
        slots = np.arange(self.buffer_size)[:, None]
        within = (slots - self.ep_start) % self.buffer_size < self.ep_length
        in_buffer = (self.ep_start >= 0) & (self.ep_start < self.buffer_size) & (self.ep_length <= self.buffer_size)
        if not np.where(self.ep_length == 0, True, within & in_buffer).all() or (self.ep_length < 0).any():
            raise state.error("fields/ep_start", "does not agree with the lengths of episodes")
        if not ((self._current_ep_start >= 0) & (self._current_ep_start < self.buffer_size)).all():
            raise state.error("fields/_current_ep_start", "is not in the buffer")

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        self._check_folder()
        return super().sample(batch_size, env)

    def _get_real_samples(
        self,
        batch_indices: npt.NDArray[np.int64],
        env_indices: npt.NDArray[np.int64],
        env: VecNormalize | None = None,
    ) -> Any:
        # SB3 draws both at once and gives views of that, where compiled code wants arrays.
        return self._samples_at(batch_indices.copy(), env_indices.copy(), env)
