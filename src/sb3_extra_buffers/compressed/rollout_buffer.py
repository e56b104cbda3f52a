"""Rollout buffers for PPO, A2C and their relatives."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, ClassVar

from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer

from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from sb3_extra_buffers.errors import EmptyBufferError

if TYPE_CHECKING:
    from sb3_extra_buffers.persistence.state import SavedState, State


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

    def reset(self) -> None:
        # SB3 allocates a rollout's observations here, every time. It is shown a shape without elements.
        obs_shape: Any = self.obs_shape
        no_elements: Any = dict.fromkeys(obs_shape, (0,)) if isinstance(obs_shape, dict) else (0,)
        self.obs_shape = no_elements
        try:
            super().reset()
        finally:
            self.obs_shape = obs_shape
        for store in self._stores.values():
            store.clear()
        if self._stores:
            self.observations = self._column(0)

    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        if not self.full:
            raise EmptyBufferError(
                f"The rollout is not complete: {self.pos} of {self.buffer_size} steps were added before get(). "
                "Add the rest first."
            )
        return super().get(batch_size)

    def _create_stores(self) -> None:
        arrays: Any = self.observations
        super()._create_stores()
        # SB3 2.7.0 keeps rollouts as float32, later versions in the dtype of the space: its empty arrays tell.
        for key, store in self._stores.items():
            if store.output_dtype == store.dtype:
                store.output_dtype = (arrays[key] if isinstance(arrays, dict) else arrays).dtype
        self.observations = self._column(0)

    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), "gae_lambda": self.gae_lambda, "gamma": self.gamma}

    def _state(self) -> State:
        return {**super()._state(), "generator_ready": self.generator_ready}

    def _restore(self, state: SavedState) -> None:
        self.generator_ready = state.boolean("generator_ready")
        super()._restore(state)
        self.observations = self._column(0)
        if self.generator_ready:
            if not self.full:
                raise state.error("generator_ready", "but the rollout is not complete")
            # As SB3 leaves it when batches have been taken from it.
            arrays: Any = self.observations
            if isinstance(arrays, dict):
                arrays.update({key: self.swap_and_flatten(array) for key, array in arrays.items()})
            else:
                self.observations = self.swap_and_flatten(arrays)

    def _restore_field(self, name: str, fields: SavedState) -> None:
        fresh = getattr(self, name)
        if self.generator_ready:  # flattened, where batches have been taken from it
            setattr(self, name, fields.array_of_size(name, fresh.dtype, fresh.size))
        else:
            setattr(self, name, fields.array(name, fresh.dtype, fresh.shape))


class CompressedDictRolloutBuffer(CompressedRolloutBuffer, DictRolloutBuffer):
    """The same for Dict observation spaces, each key stored on its own."""
