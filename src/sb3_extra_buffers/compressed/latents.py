"""Latents: arrays stored with each step, such as a recurrent state, that can be updated after sampling."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.anonymous_memory import zeros
from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.compressed.arguments import LatentShape
from sb3_extra_buffers.compressed.replay_buffer import CompressedReplayBuffer
from sb3_extra_buffers.compressed.rows import on_host, row_of
from sb3_extra_buffers.errors import ConfigurationError


class StepLatents(CompressedReplayBuffer):
    """A replay buffer with latents. The array of the latent ``state`` is the attribute ``latent_state``."""

    latents: dict[str, tuple[tuple[int, ...], str]]
    """The shape and dtype of each latent, for one step of one environment."""
    _rebuilt: ClassVar[tuple[str, ...]] = ("_latent_rows",)

    def _declare_latents(self, latents: Mapping[str, LatentShape]) -> None:
        """Call this before the constructor of the base class."""
        self.latents = {str(name): _shape_and_dtype(name, given) for name, given in latents.items()}
        self._latent_rows: dict[str, Any] = {}
        """The latents of the step that is being added."""
        self._saved_fields = (  # type: ignore[misc]  # a class variable elsewhere
            *type(self)._saved_fields,
            *(_attribute(name) for name in self.latents),
        )

    def _create_state(self) -> None:
        super()._create_state()
        for name, (shape, dtype) in self.latents.items():
            setattr(self, _attribute(name), zeros((self.buffer_size, self.n_envs, *shape), np.dtype(dtype)))

    def _commit(self, pos: int, *stored: Any) -> None:
        super()._commit(pos, *stored)
        for name, values in self._latent_rows.items():
            self._latent(name)[pos] = values

    def _begin_step(self, latents: Mapping[str, Any]) -> None:
        """Check the latents of a step before any of it is stored."""
        self._check_names(latents)
        self._latent_rows = {
            name: row_of(self._latent(name), on_host(latents[name])) if name in latents else 0 for name in self.latents
        }

    def _check_names(self, latents: Mapping[str, Any]) -> None:
        for name in latents:
            if name not in self.latents:
                known = ", ".join(map(repr, self.latents)) or "none"
                raise ConfigurationError(
                    f"The buffer has no latent {name!r}. Its latents are: {known}. Declare all latents in the argument "
                    f"latents of {type(self).__name__}()."
                )

    def _latent(self, name: str) -> Any:
        return getattr(self, _attribute(name))

    def _latents_at(self, places: Indices) -> dict[str, Any]:
        """Copies of the latents at some places, ``slot * n_envs + env``."""
        return {
            name: self._latent(name).reshape(-1, *shape).take(places, axis=0)
            for name, (shape, _) in self.latents.items()
        }

    def update_latents(
        self, positions: Indices | th.Tensor, latents: Mapping[str, th.Tensor | npt.NDArray[Any]]
    ) -> None:
        """Replace latents of steps, for instance by the recurrent states that the network computes now.

        Padding, and steps that have been overwritten since they were sampled, are ignored. If a batch contains a step
        several times, the last value counts.

        :param positions: The ``positions`` of a batch, or a part of them, of any shape.
        :param latents: Values of shape ``(*positions.shape, ...)`` by name. Other latents stay unchanged.
        """
        self._check_names(latents)
        where = np.asarray(on_host(positions))
        with self._lock.held:
            given = {}
            for name, values in latents.items():
                rows, shape = self._latent_values(name, values), self.latents[name][0]
                if tuple(rows.shape) != (*where.shape, *shape):
                    raise ConfigurationError(
                        f"The latent {name!r} of positions of shape {where.shape} must have the shape "
                        f"{(*where.shape, *shape)}, not {tuple(rows.shape)}."
                    )
                given[name] = rows.reshape(-1, *shape)
            places, is_stored = self._places_of(where.reshape(-1))
            self._replace_latents(places, is_stored, given)

    def _latent_values(self, name: str, values: Any) -> Any:
        """A user's values in the dtype of the latent."""
        return np.asarray(on_host(values), dtype=self._latent(name).dtype)

    def _replace_latents(self, places: Indices, is_stored: npt.NDArray[np.bool_], latents: dict[str, Any]) -> None:
        """Write the rows of ``latents`` that ``is_stored`` selects to ``places``, in order."""
        for name, rows in latents.items():
            latent = self._latent(name)
            latent.reshape(-1, *latent.shape[2:])[places] = rows[is_stored]

    @abstractmethod
    def _places_of(self, positions: Indices) -> tuple[Indices, npt.NDArray[np.bool_]]:
        """The places of the steps that are still stored, and a mask that selects them from ``positions``."""


def _attribute(name: str) -> str:
    return f"latent_{name}"


def _shape_and_dtype(name: str, given: Any) -> tuple[tuple[int, ...], str]:
    """Parse what the user declares for a latent: a shape, or a shape and a dtype."""
    try:
        is_shape = all(isinstance(size, int | np.integer) for size in given)
        shape, dtype = (given, np.float32) if is_shape else given
        dtype = np.dtype(dtype).newbyteorder("=")
        if dtype.kind not in "biuf" or min(shape, default=1) < 1:
            raise ValueError
        return tuple(int(size) for size in shape), dtype.str
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"The latent {name!r} must be declared by a shape, (256,), or by a shape and a dtype of numbers, ((256,), "
            f"'float16'), not by {given!r}."
        ) from error
