"""Convert replay buffers to and from SB3's buffers, Minari and LeRobot datasets, and to arrays, piece by piece."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.save_util import load_from_pkl
from stable_baselines3.her import HerReplayBuffer

from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.compressed.lerobot import LeRobotFolder, write_dataset
from sb3_extra_buffers.compressed.rows import map_parts, part_of, parts_at
from sb3_extra_buffers.compressed.saving import SaveableBuffer
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.persistence.files import bar
from sb3_extra_buffers.storage.base_store import CPU
from sb3_extra_buffers.storage.observation_array import ObservationArray

if TYPE_CHECKING:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from minari import MinariDataset
    from typing_extensions import Self

_SLOTS_AT_ONCE = 256
"""How many slots :meth:`Conversions.to_sb3` decodes at a time, to limit its memory."""
_FIELDS = ("actions", "rewards", "dones", "timeouts")


class Episode(NamedTuple):
    """One episode of a buffer. It has one more observation than actions."""

    observations: Any
    actions: npt.NDArray[Any]
    rewards: npt.NDArray[Any]
    terminations: npt.NDArray[np.bool_]
    truncations: npt.NDArray[np.bool_]


class Conversions(SaveableBuffer, ReplayBuffer):
    """Methods that convert a compressed replay buffer."""

    def to_numpy(self, chunk_size: int = 1024) -> Iterator[dict[str, Any]]:
        """Yield all transitions as arrays like SB3's, oldest first, ``chunk_size`` slots at a time.

        Each chunk has ``observations``, ``next_observations``, ``actions``, ``rewards``, ``dones`` and ``timeouts`` of
        shape ``(slots, n_envs, ...)``; observations of a Dict space are dicts.
        """
        slots = _complete_slots(self)
        for start in range(0, len(slots), chunk_size):
            chosen = slots[start : start + chunk_size]
            yield {
                "observations": parts_at(_raw(self.observations), chosen),
                "next_observations": parts_at(_raw(self.next_observations), chosen),
                **{name: self._field_rows(name, chosen) for name in _FIELDS},
            }

    def to_sb3(self) -> ReplayBuffer:
        """Create SB3's ``ReplayBuffer`` or ``DictReplayBuffer`` with the same transitions in the same slots."""
        is_dict = isinstance(self.observation_space, spaces.Dict)
        optimize = self.optimize_memory_usage and not is_dict  # SB3's Dict buffer does not support it
        plain = (DictReplayBuffer if is_dict else ReplayBuffer)(
            self.buffer_size * self.n_envs,
            self.observation_space,  # type: ignore[arg-type]  # a Dict space for the Dict buffer
            self.action_space,
            self.device,
            n_envs=self.n_envs,
            optimize_memory_usage=optimize,
            handle_timeout_termination=self.handle_timeout_termination,
        )
        columns = ("observations",) if optimize else ("observations", "next_observations")
        with self._lock.held:
            for name in _FIELDS:
                getattr(plain, name)[:] = self._field_rows(name)
            # With optimize_memory_usage, the next observation of the newest transition is in the next slot.
            used = self.buffer_size if self.full else min(self.pos + int(optimize), self.buffer_size)
            for start in range(0, used, _SLOTS_AT_ONCE):
                slots = slice(start, min(start + _SLOTS_AT_ONCE, used))
                for column in columns:
                    _copy(_raw(getattr(self, column)), getattr(plain, column), slots)
            plain.pos, plain.full = self.pos, self.full
        return plain

    @classmethod
    def from_sb3(cls, source: ReplayBuffer | str | Path, device: th.device | str = "auto", **kwargs: Any) -> Self:
        """Create a buffer from one of SB3's.

        Transitions keep their slots, so both buffers sample the same batches under the same seed. Only the oldest
        transition of a full buffer with ``optimize_memory_usage`` has lost its observation: if this buffer is created
        with ``optimize_memory_usage=False``, it is left out, and the others begin at slot 0.

        :param source: A ``ReplayBuffer`` or ``DictReplayBuffer``, or a file of ``model.save_replay_buffer``. Such a
            file is a pickle, which can run any code: pass only files that you trust.
        :param kwargs: Further arguments of this class, such as ``compression_method``. A HER buffer needs ``env``, or
            :meth:`set_env`, before it can sample.
        """
        if not isinstance(source, ReplayBuffer):
            source = load_from_pkl(source)
        if not isinstance(source, ReplayBuffer) or isinstance(source, HerReplayBuffer):
            raise ConfigurationError(
                f"A {type(source).__name__} cannot be converted, only SB3's ReplayBuffer and DictReplayBuffer."
            )
        for name in ("optimize_memory_usage", "handle_timeout_termination"):
            kwargs.setdefault(name, getattr(source, name))
        size, n_envs = source.buffer_size, source.n_envs
        buffer = cls._create(
            size * n_envs, source.observation_space, source.action_space, device, n_envs=n_envs, **kwargs
        )
        if buffer.size():
            raise ConfigurationError(
                f"{kwargs.get('path')} holds a buffer already. Use load() to reopen it, or convert into another folder."
            )
        slots = _slots_by_age(source)
        complete = slots if buffer.optimize_memory_usage else _complete_slots(source)
        if len(complete) == len(slots):
            buffer._begin_at(source.pos if source.full else 0)
        observations = _raw(source.observations)
        following = observations if source.optimize_memory_usage else _raw(source.next_observations)
        shift = 1 if source.optimize_memory_usage else 0
        with bar("converting", source.size(), None, unit="steps") as update:
            for slot in complete.tolist():
                buffer.add(
                    parts_at(observations, slot),
                    parts_at(following, (slot + shift) % size),
                    source.actions[slot],
                    source.rewards[slot],
                    source.dones[slot],
                    [{"TimeLimit.truncated": bool(timeout)} for timeout in source.timeouts[slot]],
                )
                update(1)
        return buffer

    def to_minari(self, dataset_id: str, **kwargs: Any) -> MinariDataset:
        """Write the buffer as a Minari dataset, which has an episode for each whole or partial episode.

        An episode that has not ended, or that the environment reset without a ``done``, ends with a truncation in the
        dataset. An episode whose first steps were overwritten begins at its oldest step left. Images are lossless.

        :param dataset_id: In Minari's format: ``"game/name-v0"``.
        :param kwargs: Further arguments of ``minari.create_dataset_from_buffers``.
        """
        minari = _minari()
        given = {"observation_space": self.observation_space, "action_space": self.action_space, "jpeg_encoding": False}
        # It is annotated to take a list, but a generator works, too, and keeps one episode at a time in memory.
        episodes = (minari.data_collector.EpisodeBuffer(**episode._asdict()) for episode in _episodes(self))
        dataset: MinariDataset = minari.create_dataset_from_buffers(dataset_id, episodes, **{**given, **kwargs})
        return dataset

    @classmethod
    def from_minari(
        cls,
        dataset: MinariDataset | str,
        device: th.device | str = "auto",
        buffer_size: int | None = None,
        **kwargs: Any,
    ) -> Self:
        """Create a buffer for one environment from a Minari dataset.

        Episodes are read one after the other. With ``storage="mmap"``, neither the dataset nor the buffer has to fit
        into memory. If the folder holds the first steps of the dataset already, the import continues after them.

        :param dataset: The dataset, or its id.
        :param buffer_size: By default, the number of transitions in the dataset.
        :param kwargs: Further arguments of this class.
        """
        if isinstance(dataset, str):
            dataset = _minari().load_dataset(dataset)
        total = int(dataset.total_steps)
        observed, acting = dataset.observation_space, dataset.action_space
        buffer = cls._create(buffer_size or total, observed, acting, device, **kwargs)
        buffer._import(_steps_of(dataset), total, kwargs.get("path"))
        return buffer

    def to_lerobot(self, repo_id: str, fps: int, task: str = "from_replay_buffer", **kwargs: Any) -> LeRobotDataset:
        """Write the buffer as a LeRobot dataset, which has an episode for each whole or partial episode.

        Episodes begin and end as with :meth:`to_minari`. LeRobot cannot store the observation after the last action of
        an episode: it is left out. RGB images are stored as PNG, which is lossless.

        :param repo_id: The name of the dataset: ``"user/name"``. Nothing is uploaded.
        :param fps: Steps per second.
        :param task: What the agent did, in words.
        :param kwargs: Further arguments of ``LeRobotDataset.create``, such as ``root``, the folder.
        """
        return write_dataset(
            _episodes(self), self.observation_space, self.action_space, repo_id, task, fps=fps, **kwargs
        )

    @classmethod
    def from_lerobot(
        cls,
        dataset: LeRobotDataset | str | Path,
        device: th.device | str = "auto",
        buffer_size: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        observation_space: spaces.Space[Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Create a buffer for one environment from a LeRobot dataset on the local disk.

        Frames are read one after the other: as with :meth:`from_minari`, neither the dataset nor a buffer on disk has
        to fit into memory, and an interrupted import can be continued. Images are channels first.

        The next observation of a frame is the observation of the following frame. LeRobot does not store the
        observation after the last action of an episode: there, the last frame's own observation is used, and the
        episode counts as truncated unless ``next.done`` is set.

        :param dataset: The dataset, or its folder.
        :param buffer_size: By default, the number of frames in the dataset.
        :param columns: The columns that make up an observation; by default all that begin with ``observation``. Their
            keys have no prefix: ``observation.images.top`` gets the key ``top``.
        :param observation_space: By default, one without bounds.
        :param action_space: By default, one without bounds.
        :param kwargs: Further arguments of this class.
        """
        folder = LeRobotFolder(dataset, columns, as_dict=issubclass(cls, DictReplayBuffer))
        observed, acting = observation_space or folder.observation_space, action_space or folder.action_space
        buffer = cls._create(buffer_size or folder.total_frames, observed, acting, device, **kwargs)
        buffer._import(folder.steps(), folder.total_frames, kwargs.get("path"))
        return buffer

    @classmethod
    def _create(
        cls,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str,
        **kwargs: Any,
    ) -> Self:
        """Create a buffer for a conversion."""
        if issubclass(cls, HerReplayBuffer):
            kwargs.setdefault("env", None)  # until set_env()
        return cls(buffer_size, observation_space, action_space, device=device, **kwargs)

    def _begin_at(self, slot: int) -> None:
        """Let the first step of an empty buffer go into this slot."""
        self.pos = slot

    def _import(self, steps: Iterable[tuple[Any, ...]], total: int, path: Any) -> None:
        """Add the steps of a dataset, except for those that a buffer reopened from ``path`` holds already."""
        n_there = self.size()
        if n_there and self.buffer_size < total:
            raise ConfigurationError(
                f"{path} holds a buffer already, which is smaller than the dataset. Use load() to "
                "reopen it, or another folder to import the dataset."
            )
        for number, step in enumerate(steps):
            if number >= n_there:
                self.add(*step)
            elif number == min(n_there, total) - 1 and not _holds_step(self, number, step):
                raise ConfigurationError(
                    f"{path} holds a buffer of other data than this dataset. Import it into another folder."
                )
        self.flush()


def _steps_of(dataset: MinariDataset) -> Iterator[tuple[Any, ...]]:
    """Yield all steps of a dataset as arguments of ``add()``. Only one episode at a time is in memory."""
    for episode in dataset.iterate_episodes():
        for step in range(len(episode.rewards)):
            terminated, truncated = bool(episode.terminations[step]), bool(episode.truncations[step])
            yield (
                parts_at(episode.observations, slice(step, step + 1)),
                parts_at(episode.observations, slice(step + 1, step + 2)),
                np.asarray(episode.actions[step : step + 1]),
                np.asarray(episode.rewards[step : step + 1]),
                np.array([terminated or truncated]),
                [{"TimeLimit.truncated": truncated and not terminated}],
            )


def _holds_step(buffer: Conversions, slot: int, step: tuple[Any, ...]) -> bool:
    """Whether a slot of a buffer holds this step of a dataset."""
    obs, _, action, reward = step[:4]
    where = np.array([slot])
    (stored_action,) = buffer._field_rows("actions", where)
    same_action = stored_action.reshape(-1) == action.reshape(-1).astype(stored_action.dtype)
    same_reward = buffer.rewards[slot] == reward.astype(buffer.rewards.dtype)
    if not (same_action.all() and same_reward.all()):
        return False
    for key, store in buffer._stores.items():
        (stored,) = store.read_stored([(0, where)], np.zeros_like(where), CPU)
        if _differ(stored, store.checked(part_of(obs, key))).any():  # both as stored, which may be lossy
            return False
    return True


def _minari() -> Any:
    if sys.version_info < (3, 11):
        raise ConfigurationError(
            "Datasets of Minari need Python 3.11: versions of Minari for older ones store images as JPEG, with loss."
        )
    return require("minari", "A dataset of Minari", "minari")


def _episodes(buffer: Conversions) -> Iterator[Episode]:
    """Yield all episodes, one environment after the other."""
    slots = _complete_slots(buffer)
    actions, dones, timeouts = (buffer._field_rows(name) for name in ("actions", "dones", "timeouts"))
    for env in range(buffer.n_envs):
        ended = (dones[slots, env] > 0) | (timeouts[slots, env] > 0)  # ingest_segment() sets a timeout alone
        for part in np.split(slots, np.flatnonzero(ended) + 1):
            envs = np.full(len(part), env)
            columns = (buffer.observations, buffer.next_observations)
            obs, next_obs = (parts_at(_raw(column), (part, envs)) for column in columns)
            # A reset without a done also ends an episode.
            breaks = np.flatnonzero(_differ(parts_at(next_obs, slice(None, -1)), parts_at(obs, slice(1, None)))) + 1
            for rows in np.split(np.arange(len(part)), breaks):
                if not len(rows):
                    continue
                where = part[rows], env
                truncations = timeouts[where] > 0
                terminations = (dones[where] > 0) & ~truncations
                truncations[-1] |= not terminations[-1]
                observations = map_parts(
                    lambda *parts: np.concatenate(parts), parts_at(obs, rows), parts_at(next_obs, rows[-1:])
                )
                yield Episode(
                    observations=_as_in_space(observations, buffer.observation_space),
                    actions=_as_in_space(actions[where], buffer.action_space),
                    rewards=buffer.rewards[where],
                    terminations=terminations,
                    truncations=truncations,
                )


def _raw(observations: Any) -> Any:
    """The observations of a buffer before any normalization. SB3's arrays have them like this."""
    return map_parts(lambda array: array.raw if isinstance(array, ObservationArray) else array, observations)


def _slots_by_age(buffer: ReplayBuffer) -> npt.NDArray[np.int64]:
    """Slots that hold a transition, oldest first."""
    oldest = buffer.pos if buffer.full else 0
    return (oldest + np.arange(buffer.size())) % buffer.buffer_size


def _complete_slots(buffer: ReplayBuffer) -> npt.NDArray[np.int64]:
    """Slots with a whole transition, oldest first: ``optimize_memory_usage`` overwrites the oldest observation."""
    slots = _slots_by_age(buffer)
    return slots[1:] if buffer.optimize_memory_usage and buffer.full else slots


def _copy(source: Any, target: Any, slots: slice) -> None:
    map_parts(lambda array, copied: copied.__setitem__(slots, array[slots]), source, target)


def _differ(left: Any, right: Any) -> npt.NDArray[np.bool_]:
    """Find the rows in which observations differ. NaN equals NaN."""
    if isinstance(left, dict):
        return np.logical_or.reduce([_differ(array, right[key]) for key, array in left.items()])  # type: ignore[no-any-return]
    same = (left == right) | ((left != left) & (right != right))
    return ~same.all(axis=tuple(range(1, same.ndim)))  # type: ignore[no-any-return]


def _as_in_space(rows: Any, space: spaces.Space[Any]) -> Any:
    """Give rows the shape and dtype of their space: SB3 stores scalars as arrays of one element, and actions flat."""
    if isinstance(space, spaces.Dict):
        return {key: _as_in_space(rows[key], part) for key, part in space.spaces.items()}
    return rows.reshape(len(rows), *(space.shape or ())).astype(space.dtype, copy=False)
