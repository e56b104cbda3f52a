"""Rollout buffers on a torch device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples, RolloutBufferSamples
from stable_baselines3.common.vec_env import VecNormalize
from typing_extensions import Unpack

from sb3_extra_buffers.compressed.base import SINGLE
from sb3_extra_buffers.compressed.rollout_buffer import CompressedRolloutBuffer
from sb3_extra_buffers.gpu_buffers.base import BaseGpuBuffer, GpuOptions, part_of
from sb3_extra_buffers.gpu_buffers.places import Places
from sb3_extra_buffers.gpu_buffers.transfer import Outbox, upload

_NUMBERS = ("values", "log_probs", "advantages", "returns")


class GpuRolloutBuffer(BaseGpuBuffer, CompressedRolloutBuffer):
    """SB3's ``RolloutBuffer`` on a torch device: same arguments, same batches under the same seed.

    A finished rollout crosses the bus once, compressed, however many epochs are trained on it.

    Further arguments: see :class:`~sb3_extra_buffers.gpu_buffers.base.BaseGpuBuffer`.
    """

    _numbers: tuple[th.Tensor, th.Tensor] | None = None
    """On the device: actions, and the rows of ``_NUMBERS``. Set while batches are taken from a rollout."""

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        gae_lambda: float = 1,
        gamma: float = 0.99,
        n_envs: int = 1,
        **options: Unpack[GpuOptions],
    ) -> None:
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device=device,
            n_envs=n_envs,
            gae_lambda=gae_lambda,
            gamma=gamma,
            **options,
        )

    def reset(self) -> None:
        super().reset()
        self._numbers = None

    def _checked_observations(self, obs: Any) -> Any:
        self._settle()
        stores = self._device_stores
        steps = {key: store.checked_step([part_of(obs, key)]) for key, store in stores.items()}
        for key, store in stores.items():
            store.make_room(steps[key])
        return steps

    def _write_observations(self, slot: int, checked: Any) -> None:
        for key, store in self._device_stores.items():
            store.write_step([(0, slot)], checked[key])

    def _get_samples(self, batch_inds: npt.NDArray[np.int64], env: VecNormalize | None = None) -> Any:
        self._settle()
        envs, slots = np.divmod(batch_inds, self.buffer_size)
        with Outbox(self._location) as outbox:
            for store in self._device_stores.values():
                store.flush(outbox)
        places = Places([slots], envs, self._location, (batch_inds,))
        found = {key: store.read_tensors([0], places)[0] for key, store in self._device_stores.items()}
        actions, numbers = self._numbers or self._send_numbers()
        chosen = places.tensor[2]
        observations = {key: self._output(tensor) for key, tensor in found.items()}
        rest = self._output(actions[chosen]), *self._output(numbers[:, chosen]).unbind(0)
        if SINGLE in observations:
            return RolloutBufferSamples(observations[SINGLE], *rest)
        return DictRolloutBufferSamples(observations, *rest)

    def _send_numbers(self) -> tuple[th.Tensor, th.Tensor]:
        numbers = np.stack([getattr(self, name).reshape(-1) for name in _NUMBERS])
        actions = self.actions.astype(np.float32, copy=False)
        self._numbers = upload(actions, self._location), upload(numbers, self._location)
        return self._numbers

    def _settle(self) -> None:
        before = self._location
        super()._settle()
        if before != self._location:
            self._numbers = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_numbers": None, "_location": None, "_settled_for": None}


class GpuDictRolloutBuffer(GpuRolloutBuffer, DictRolloutBuffer):
    """The same for Dict observation spaces, each key stored on its own."""
