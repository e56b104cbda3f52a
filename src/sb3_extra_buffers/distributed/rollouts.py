"""A rollout buffer of several parts, one for each collector."""

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
from sb3_extra_buffers.compressed.rows import map_parts
from sb3_extra_buffers.errors import EmptyBufferError
from sb3_extra_buffers.storage.base_store import BaseStore
from sb3_extra_buffers.storage.observation_array import ObservationArray
from sb3_extra_buffers.storage.usage import MemoryUsage


class ShardedRolloutBuffer(RolloutBuffer):
    """The compressed rollouts of several collectors, as one rollout with the environments of all of them.

    Parts are filled by :meth:`CompressedRolloutBuffer.ingest_segment`. Call :meth:`join` afterwards.

    :param buffer_size: Steps of a rollout.
    :param n_envs: The environments of all parts together.
    :param parts: Number of parts.
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
        """Concatenate the fields of all parts. Observations stay compressed in the parts."""
        for name in CompressedRolloutBuffer._saved_fields:
            setattr(self, name, np.concatenate([getattr(part, name) for part in self.parts], axis=1))
        self.observations = map_parts(_side_by_side, *(part.observations for part in self.parts))
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
    """A :class:`ShardedRolloutBuffer` for Dict observation spaces."""

    part_class = CompressedDictRolloutBuffer


def _side_by_side(*columns: ObservationArray) -> ObservationArray:
    """Join the observations of all parts, environment by environment."""
    store: Any = _JoinedStores([column.store for column in columns])
    return ObservationArray(store)


class _JoinedStores:
    """The stores of all parts, with their environments side by side, for an ``ObservationArray`` to read."""

    def __init__(self, stores: Sequence[BaseStore]) -> None:
        self._stores, first = stores, stores[0]
        self.n_slots, self.n_envs, self.shape = first.n_slots, first.n_envs * len(stores), first.shape
        self.output_dtype, self.outputs, self.label = first.output_dtype, first.outputs, first.label

    def read(self, wanted: list[tuple[int, Indices]], envs: Indices, device: th.device) -> list[npt.NDArray[Any]]:
        """See :meth:`.BaseStore.read`. ``wanted`` has a single column, because rollouts have no next observations."""
        if len(self._stores) == 1:
            return self._stores[0].read(wanted, envs, device)
        ((column, slots),) = wanted
        numbers, own = np.divmod(envs, self._stores[0].n_envs)
        found = None
        for number in np.unique(numbers).tolist():
            mine = np.flatnonzero(numbers == number)
            (rows,) = self._stores[number].read([(column, slots[mine])], own[mine], device)
            if found is None:
                found = np.empty((len(envs), *rows.shape[1:]), rows.dtype)
            found[mine] = rows
        assert found is not None
        return [found]
