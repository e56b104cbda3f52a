"""Rollout buffers for PPO, A2C and their relatives."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples, RolloutBufferSamples
from typing_extensions import Unpack

from sb3_extra_buffers.compressed.arguments import StorageOptions
from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from sb3_extra_buffers.compressed.rows import map_parts, on_host, part_of, row_of
from sb3_extra_buffers.errors import EmptyBufferError, SegmentError
from sb3_extra_buffers.interruption import uninterrupted
from sb3_extra_buffers.state import SavedState, State


class CompressedRolloutBuffer(BaseCompressedBuffer, RolloutBuffer):
    """SB3's ``RolloutBuffer`` with compressed observations: same arguments, same batches under the same seed.

    Further arguments: see :class:`~sb3_extra_buffers.compressed.base.BaseCompressedBuffer`.
    """

    _saved_fields: ClassVar[tuple[str, ...]] = (
        "actions",
        "rewards",
        "returns",
        "episode_starts",
        "values",
        "log_probs",
        "advantages",
    )

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        gae_lambda: float = 1,
        gamma: float = 0.99,
        n_envs: int = 1,
        **options: Unpack[StorageOptions],
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
        # SB3 allocates arrays for observations here, every time. A shape without elements keeps them empty.
        obs_shape: Any = self.obs_shape
        no_elements: Any = dict.fromkeys(obs_shape, (0,)) if isinstance(obs_shape, dict) else (0,)
        with self._lock.held:
            n_steps = self.pos
            self.obs_shape = no_elements
            try:
                super().reset()
            finally:
                self.obs_shape = obs_shape
                if self._stores:
                    self.observations = self._column(0)
            for store in self._stores.values():
                store.clear()
            if self._exported is not None:
                self._exported.n_steps += n_steps - self._exported.pos  # count steps that will never be exported
                self._exported.pos = 0
            if self._received is not None:
                self._received.pos = 0

    def add(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        episode_start: Any,
        value: th.Tensor,
        log_prob: th.Tensor,
        **extra: Any,
    ) -> None:
        # Not SB3's method, which would store half of a step if one of its values is invalid.
        with self._lock.held:
            pos = self.pos
            if pos >= self.buffer_size:
                raise IndexError(
                    f"The rollout has all of its {self.buffer_size} steps: call reset() before adding more."
                )
            rows = {
                "actions": row_of(self.actions, np.asarray(on_host(action)).reshape(self.n_envs, self.action_dim)),
                "rewards": row_of(self.rewards, on_host(reward)),
                "episode_starts": row_of(self.episode_starts, on_host(episode_start)),
                "values": row_of(self.values, np.ravel(on_host(value))),
                "log_probs": row_of(self.log_probs, on_host(log_prob)),
                **self._extra_rows(**extra),
            }
            self._write_observations(pos, self._checked_observations(obs))
            try:
                self._commit(pos, rows)
            except BaseException:  # Ctrl-C: complete the step before it is raised
                self._commit(pos, rows)
                raise

    def _commit(self, pos: int, rows: dict[str, npt.NDArray[Any]]) -> None:
        """Store the fields of the step at ``pos``, and advance. Doing it twice does no harm."""
        for name, row in rows.items():
            getattr(self, name)[pos] = row
        self.pos = pos + 1
        self.full = self.pos == self.buffer_size

    def _extra_rows(self, **unknown: Any) -> dict[str, npt.NDArray[Any]]:
        """Convert the arguments that derived classes add to :meth:`add`. Returns a row by the name of its array."""
        if unknown:
            raise TypeError(f"{type(self).__name__}.add() got an unexpected keyword argument {next(iter(unknown))!r}")
        return {}

    def _checked_observations(self, obs: Any) -> Any:
        """Check the observations of a step. Returns what :meth:`_write_observations` takes."""
        return {key: store.checked(part_of(obs, key)) for key, store in self._stores.items()}

    def _write_observations(self, slot: int, checked: Any) -> None:
        for key, store in self._stores.items():
            store.write(0, slot, checked[key])

    def _check_room(self, n_steps: int, continues: bool) -> None:
        if self.pos + n_steps > self.buffer_size:
            raise SegmentError(
                f"The segment has {n_steps} steps, but the rollout has only room for {self.buffer_size - self.pos} "
                "more: call reset() before a new rollout begins."
            )
        if self.pos and not continues:
            raise SegmentError("The segment does not continue the rollout: advantages would be wrong. Call reset().")

    def get(self, batch_size: int | None = None) -> Generator[RolloutBufferSamples, None, None]:
        if not self.full:
            raise EmptyBufferError(
                f"The rollout is not complete: {self.pos} of {self.buffer_size} steps were added before get(). "
                "Add the rest first."
            )
        return _after_whole_start(super().get(batch_size))

    def _create_stores(self) -> None:
        arrays: Any = self.observations
        super()._create_stores()
        # SB3 2.7.0 keeps observations as float32, later versions in the space's dtype. Its empty arrays show which.
        for key, store in self._stores.items():
            if store.output_dtype == store.dtype:
                store.output_dtype = (arrays[key] if isinstance(arrays, dict) else arrays).dtype
        self.observations = self._column(0)

    def _state(self) -> State:
        return {**super()._state(), "generator_ready": self.generator_ready}

    def _restore(self, state: SavedState) -> None:
        self.generator_ready = state.boolean("generator_ready")
        super()._restore(state)
        self.observations = self._column(0)
        if self.generator_ready:
            if not self.full:
                raise state.error("generator_ready", "but the rollout is not complete")
            # SB3 flattens all arrays before the first batch.
            self.observations = map_parts(self.swap_and_flatten, self.observations)

    def _restore_field(self, name: str, fields: SavedState) -> None:
        fresh = getattr(self, name)
        dtype, stored = fresh.dtype, fields.dtype(name)
        # SB3 2.7.0 keeps actions as float32, later versions in the dtype of the space.
        if name == "actions" and stored in (np.float32, self.action_space.dtype):
            dtype = stored
        if self.generator_ready:  # flattened before the first batch
            saved = fields.array_of_size(name, dtype, fresh.size)
        else:
            saved = fields.array(name, dtype, fresh.shape)
        setattr(self, name, saved.astype(fresh.dtype, copy=False))


class CompressedDictRolloutBuffer(CompressedRolloutBuffer, DictRolloutBuffer):
    """:class:`CompressedRolloutBuffer` for Dict observation spaces. Each key is stored on its own."""

    if TYPE_CHECKING:

        def get(self, batch_size: int | None = None) -> Generator[DictRolloutBufferSamples, None, None]: ...  # type: ignore[override]


def _after_whole_start(batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
    """The same batches. SB3 flattens all arrays before the first one: Ctrl-C must not leave only some of them flat."""
    with uninterrupted():
        first = [next(batches)]
    yield first.pop()  # a variable would keep the memory of the batch in use
    yield from batches
