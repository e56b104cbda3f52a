"""Replay buffers on a torch device that sample sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.compressed.prioritized_sequence_buffer import CompressedPrioritizedSequenceReplayBuffer
from sb3_extra_buffers.compressed.rows import SINGLE, map_parts, on_host
from sb3_extra_buffers.compressed.sequence_buffer import CompressedSequenceReplayBuffer, Steps
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.gpu_buffers.base import normal_tensors
from sb3_extra_buffers.gpu_buffers.normalization import normalize_obs, normalize_reward
from sb3_extra_buffers.gpu_buffers.replay_buffer import GpuDictReplayBuffer, GpuReplayBuffer
from sb3_extra_buffers.gpu_buffers.transfer import Observations, Places, copy_into, upload
from sb3_extra_buffers.state import SavedState


class GpuSequenceReplayBuffer(CompressedSequenceReplayBuffer, GpuReplayBuffer):  # type: ignore[misc]  # sequences
    """:class:`.CompressedSequenceReplayBuffer` on a torch device: same arguments, same batches under the same seed.

    Observations, actions, rewards and latents are on the device. The host keeps track of where sequences may begin and
    which steps end an episode, so ``add()`` waits for the device if it gets tensors.

    Further arguments: see :class:`~sb3_extra_buffers.gpu_buffers.base.BaseGpuBuffer`.
    """

    _rebuilt: ClassVar[tuple[str, ...]] = ("_continues",)
    _continues: bool | None = None
    """Whether the step being added is known to continue the previous step in all environments: its observation is the
    previous next observation. ``None`` before the step is stored."""

    def _create_state(self) -> None:
        super()._create_state()
        for name in self.latents:
            setattr(self, f"latent_{name}", upload(self._latent(name), self._location))

    def _move_fields(self, location: th.device) -> None:
        super()._move_fields(location)
        for name in self.latents:
            setattr(self, f"latent_{name}", self._latent(name).to(location))

    @property
    def _device_latents(self) -> dict[str, th.Tensor]:
        """The latents of all steps, each of shape ``(slots * environments, ...)``."""
        return {name: self._latent(name).flatten(0, 1) for name in self.latents}

    @property
    def _field_bytes(self) -> int:
        return super()._field_bytes + sum(latent.nbytes for latent in self._device_latents.values())

    def _device_tensors(self) -> list[th.Tensor]:
        return [*super()._device_tensors(), *self._device_latents.values()]

    # Adding

    def _begin_step(self, latents: Mapping[str, Any]) -> None:
        self._continues = None
        self._check_names(latents)
        with normal_tensors():
            self._follow_device()
            self._latent_rows = dict.fromkeys(self.latents, 0) | {
                name: self._latent_row(name, values) for name, values in latents.items()
            }

    def _latent_row(self, name: str, values: Any) -> th.Tensor:
        """The values of a latent for one step of all environments, as a tensor on the device."""
        latent = self._latent(name)
        is_here = isinstance(values, th.Tensor) and values.device == latent.device
        row: Any = th.empty_like(latent[0]) if is_here else np.empty(latent.shape[1:], self.latents[name][1])
        try:
            row[...] = values.detach() if is_here else on_host(values)
        except RuntimeError as error:
            raise ConfigurationError(
                f"The latent {name!r} of a step must have the shape {tuple(row.shape)}, not {tuple(values.shape)}."
            ) from error
        return row if is_here else upload(row, self._location)

    def _field_tensors(self, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Return ``None``: the host must know which steps end an episode, so all fields pass through it."""

    def _commit(self, pos: int, staged: list[tuple[Any, Any]], row: Any) -> None:
        if self._continues is None:
            self._continues = all(isinstance(step.parts, Observations) and step.parts.continues for _, step in staged)
        else:
            self._continues = False  # A second attempt: the newest stored observation may belong to this step.
        super()._commit(pos, staged, row)

    def _follows(self, previous: int, slot: int) -> npt.NDArray[np.bool_]:
        if self._continues or self._has_ended(previous).all():
            return np.ones(self.n_envs, dtype=np.bool_)
        return super()._follows(previous, slot)

    def _has_ended(self, places: Any) -> npt.NDArray[np.bool_]:
        ended: npt.NDArray[np.bool_] = self._fields.peek("dones")[places] + self._fields.peek("timeouts")[places] > 0
        return ended

    def _dones_at(self, places: Indices) -> npt.NDArray[np.float32]:
        where = np.divmod(places, self.n_envs)
        dones: npt.NDArray[np.float32] = self._fields.peek("dones")[where] * (1 - self._fields.peek("timeouts")[where])
        return dones

    # Sampling

    def _steps_at(self, places: Indices, hidden: npt.NDArray[np.bool_] | None, env: VecNormalize | None) -> Steps:
        with normal_tensors():
            self._follow_device()
            slots, envs = np.divmod(places, self.n_envs)
            sent = self._places([slots], envs)
            columns = [0, 1] if self.include_next_observations else [0]
            found, (actions, rewards, _) = self._gathered(columns, sent)
            parts = [{key: part[column] for key, part in found.items()} for column in columns]
            observations = [normalize_obs(part.get(SINGLE, part), env) for part in parts]
            steps = Steps(
                observations[0],
                observations[1] if self.include_next_observations else {},
                actions,
                normalize_reward(rewards, env)[:, 0],
                self._latents_of(sent),
            )
            if hidden is not None:
                is_hidden = upload(hidden, self._location)[:, None]
                for part in steps:
                    map_parts(lambda rows: _in_words(rows).masked_fill_(is_hidden, 0), part)
            return steps if self._outputs_stay else Steps(*map(self._to_device, steps))

    def _flag_tensors(self, flags: dict[str, npt.NDArray[np.bool_]]) -> dict[str, th.Tensor]:
        with normal_tensors():
            n, shape = len(flags), flags["mask"].shape
            size = n * math.prod(shape)
            staging = self._staging_for(size, th.uint8)
            row = staging.next()
            np.stack([*flags.values()], out=staging.arrays[row][:size].view(np.bool_).reshape(n, *shape))
            sent = staging.send(row, size)[:size].view(n, *shape).unbind()
            return {name: self._to_device(flag.to(th.bool)) for name, flag in zip(flags, sent, strict=True)}

    # Latents

    def _latents_of(self, places: Places) -> dict[str, th.Tensor]:
        if not self.latents:
            return {}
        slots, envs = places.rows(0)
        rows, latents = slots * self.n_envs + envs, self._device_latents
        found = {name: _as_bytes(latent).index_select(0, rows).view(latent.dtype) for name, latent in latents.items()}
        return {name: rows.view(places.n, *self.latents[name][0]) for name, rows in found.items()}

    def _latent_values(self, name: str, values: Any) -> th.Tensor:
        with normal_tensors():
            self._follow_device()
            latent = self._latent(name)
            if isinstance(values, th.Tensor) and values.device == latent.device:
                return values.detach().to(latent.dtype)
            return upload(np.asarray(on_host(values), dtype=self.latents[name][1]), self._location)

    def _replace_latents(self, places: Indices, is_stored: npt.NDArray[np.bool_], latents: dict[str, Any]) -> None:
        # If a place occurs several times, its last value counts. A GPU would write them in any order.
        targets, first = np.unique(places[::-1], return_index=True)
        sources = np.flatnonzero(is_stored)[::-1][first]
        with normal_tensors():
            to, of = upload(np.stack([targets, sources]), self._location)
            for name, rows in latents.items():
                _as_bytes(self._device_latents[name]).index_copy_(0, to, _as_bytes(rows).index_select(0, of))

    # Saving

    def _field_rows(self, name: str, slots: Indices | None = None) -> npt.NDArray[Any]:
        rows: Any = super()._field_rows(name, slots)
        return on_host(rows)  # type: ignore[no-any-return]

    def _restore_field(self, name: str, fields: SavedState) -> None:
        field = getattr(self, name)
        if isinstance(field, th.Tensor):
            dtype = np.dtype(self.latents[name.removeprefix("latent_")][1])
            copy_into(field, fields.array(name, dtype, tuple(field.shape)))
        else:
            super()._restore_field(name, fields)


class GpuDictSequenceReplayBuffer(GpuSequenceReplayBuffer, GpuDictReplayBuffer):  # type: ignore[misc]  # sequences
    """:class:`GpuSequenceReplayBuffer` for Dict observation spaces, with a store for each key."""


class GpuPrioritizedSequenceReplayBuffer(  # type: ignore[misc]  # sequences
    CompressedPrioritizedSequenceReplayBuffer, GpuSequenceReplayBuffer
):
    """:class:`.CompressedPrioritizedSequenceReplayBuffer` on a torch device, with priorities on the host."""


class GpuDictPrioritizedSequenceReplayBuffer(  # type: ignore[misc]  # sequences
    GpuPrioritizedSequenceReplayBuffer, GpuDictSequenceReplayBuffer
):
    """:class:`GpuPrioritizedSequenceReplayBuffer` for Dict observation spaces, with a store for each key."""


def _as_bytes(rows: th.Tensor) -> th.Tensor:
    """View rows as bytes, ``(n, bytes)``: some of torch's operations do not support all dtypes."""
    return rows.view(len(rows), math.prod(rows.shape[1:])).view(th.uint8)


def _in_words(rows: th.Tensor) -> th.Tensor:
    """View the rows of a new tensor as words of 8 bytes, or as single bytes if words do not fit."""
    found = _as_bytes(rows)
    return found if found.shape[1] % 8 else found.view(th.int64)
