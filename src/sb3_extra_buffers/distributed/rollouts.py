"""A rollout buffer that consists of several, one for each collector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.compressed.rollout_buffer import CompressedDictRolloutBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.errors import EmptyBufferError
from sb3_extra_buffers.storage.usage import MemoryUsage


class ShardedRolloutBuffer(RolloutBuffer):
    """Compressed rollouts of several collectors. Its batches are those of one rollout with all environments.

    Parts are filled by :meth:`CompressedRolloutBuffer.ingest_segment`. Call :meth:`join` afterwards.

    :param buffer_size: Steps of a rollout.
    :param n_envs: The environments of all parts together.
    :param parts: How many buffers there are.
    :param options: Further arguments of the parts' class, ``CompressedRolloutBuffer`` or its variant for Dict spaces.
    """

    part_class: ClassVar[type[CompressedRolloutBuffer]] = CompressedRolloutBuffer

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        gae_lambda: float = 1,
        gamma: float = 0.99,
        n_envs: int = 1,
        *,
        parts: int = 1,
        **options: Any,
    ) -> None:
        given = (buffer_size, observation_space, action_space, device, gae_lambda, gamma)
        self.parts = [self.part_class(*given, n_envs // parts, **options) for _ in range(parts)]
        super().__init__(*given, n_envs)

    def reset(self) -> None:
        for part in self.parts:
            part.reset()
        self.join()

    def join(self) -> None:
        """Take over the fields of all parts. Observations stay where they are, compressed."""
        for name in CompressedRolloutBuffer._saved_fields:
            setattr(self, name, np.concatenate([getattr(part, name) for part in self.parts], axis=1))
        arrays: list[Any] = [part.observations for part in self.parts]
        if isinstance(arrays[0], dict):
            self.observations = {key: _JoinedObservations([array[key] for array in arrays]) for key in arrays[0]}  # type: ignore[assignment]
        else:
            self.observations = _JoinedObservations(arrays)  # type: ignore[assignment]
        self.generator_ready = False
        self.pos = min(part.pos for part in self.parts)
        self.full = self.pos == self.buffer_size

    def memory_usage(self) -> MemoryUsage:
        """The memory that the contents of all parts take, by kind."""
        return MemoryUsage.of_parts([part.memory_usage() for part in self.parts])

    def add(self, *step: Any) -> None:
        raise NotImplementedError("Collectors fill this buffer: use ingest_segment() of its parts, then join().")

    def get(self, batch_size: int | None = None) -> Any:
        if not self.full:
            raise EmptyBufferError(
                f"The rollout is not complete: {self.pos} of {self.buffer_size} steps of every part have arrived."
            )
        return super().get(batch_size)

    def to_torch(self, array: npt.NDArray[Any], copy: bool = True) -> th.Tensor:
        return self.parts[0].to_torch(array, copy)


class ShardedDictRolloutBuffer(ShardedRolloutBuffer, DictRolloutBuffer):
    """The same for Dict observation spaces."""

    part_class = CompressedDictRolloutBuffer


class _JoinedObservations:
    """Observations of all parts side by side, which SB3 flattens and indexes like an array."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._arrays = arrays

    @property
    def shape(self) -> tuple[int, ...]:
        n_slots, n_envs, *shape = self._arrays[0].shape
        return (n_slots, n_envs * len(self._arrays), *shape)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.concatenate([np.asarray(array, dtype) for array in self._arrays], axis=1)

    def __getitem__(self, key: Any) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = np.asarray(self)[key]
        return found

    def swapaxes(self, first: int, second: int) -> _JoinedObservations:
        """The first half of SB3's flattening, which is always followed by :meth:`reshape`."""
        return self

    def reshape(self, *shape: int) -> _FlatObservations:
        # Environments are the outer axis when they are flattened, so the parts are simply one after the other.
        n_slots, n_envs, *rest = self._arrays[0].shape
        return _FlatObservations([array.swapaxes(0, 1).reshape(n_slots * n_envs, *rest) for array in self._arrays])


class _FlatObservations:
    """All observations, part after part."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._arrays = arrays

    def __getitem__(self, places: Indices) -> npt.NDArray[Any]:
        if len(self._arrays) == 1:
            only: npt.NDArray[Any] = self._arrays[0][places]
            return only
        numbers, own = np.divmod(places, len(self._arrays[0]))
        found = None
        for number in np.unique(numbers).tolist():
            mine = np.flatnonzero(numbers == number)
            rows = self._arrays[number][own[mine]]
            if found is None:
                found = np.empty((len(places), *rows.shape[1:]), rows.dtype)
            found[mine] = rows
        assert found is not None
        return found
