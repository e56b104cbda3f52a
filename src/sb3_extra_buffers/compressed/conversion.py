"""Replay buffers to and from those of SB3, Minari's datasets and plain arrays."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.save_util import load_from_pkl
from stable_baselines3.her import HerReplayBuffer

from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.persistence.files import bar

if TYPE_CHECKING:
    from minari import MinariDataset
    from typing_extensions import Self

_SLOTS_AT_ONCE = 256


class Conversions(ReplayBuffer):
    """What a compressed replay buffer can be turned into and made from. Nothing is ever decoded as a whole."""

    def to_numpy(self, chunk_size: int = 1024) -> Iterator[dict[str, Any]]:
        """All transitions as SB3's arrays, oldest first, ``chunk_size`` slots at a time.

        Each chunk has ``observations``, ``next_observations``, ``actions``, ``rewards``, ``dones`` and ``timeouts`` of
        shape ``(slots, n_envs, ...)``; observations of a Dict space are dicts.
        """
        slots = self._slots_by_age()
        for start in range(0, len(slots), chunk_size):
            chosen = slots[start : start + chunk_size]
            fields = {name: getattr(self, name)[chosen] for name in ("actions", "rewards", "dones", "timeouts")}
            yield {
                "observations": _at(self.observations, chosen),
                "next_observations": _at(self.next_observations, chosen),
                **fields,
            }

    def to_sb3(self) -> ReplayBuffer:
        """SB3's ``ReplayBuffer`` or ``DictReplayBuffer`` with the same transitions in the same places."""
        is_dict = isinstance(self.observation_space, spaces.Dict)
        optimize = self.optimize_memory_usage and not is_dict  # which SB3's Dict buffer does not know
        plain = (DictReplayBuffer if is_dict else ReplayBuffer)(
            self.buffer_size * self.n_envs,
            self.observation_space,  # type: ignore[arg-type]  # a Dict space for the Dict buffer
            self.action_space,
            self.device,
            n_envs=self.n_envs,
            optimize_memory_usage=optimize,
            handle_timeout_termination=self.handle_timeout_termination,
        )
        for name in ("actions", "rewards", "dones", "timeouts"):
            getattr(plain, name)[:] = getattr(self, name)
        # With optimize_memory_usage, the next observation of the newest transition is one slot further.
        used = self.buffer_size if self.full else min(self.pos + int(optimize), self.buffer_size)
        for start in range(0, used, _SLOTS_AT_ONCE):
            slots = np.arange(start, min(start + _SLOTS_AT_ONCE, used))
            _put(plain.observations, slots, _at(self.observations, slots))
            if not optimize:
                _put(plain.next_observations, slots, _at(self.next_observations, slots))
        plain.pos, plain.full = self.pos, self.full
        return plain

    @classmethod
    def from_sb3(cls, source: ReplayBuffer | str | Path, device: th.device | str = "auto", **kwargs: Any) -> Self:
        """A buffer with the transitions of one of SB3's, in the same places, so that it samples the same.

        :param source: A ``ReplayBuffer`` or ``DictReplayBuffer``, or the file that ``model.save_replay_buffer`` wrote.
            Such a file is a pickle, and runs whatever code is in it: give only files that you trust.
        :param kwargs: Further arguments of this class, such as ``compression_method``.
        """
        if not isinstance(source, ReplayBuffer):
            source = load_from_pkl(source)
        if not isinstance(source, ReplayBuffer) or isinstance(source, HerReplayBuffer):
            raise ConfigurationError(
                f"A {type(source).__name__} cannot be converted, only SB3's ReplayBuffer and DictReplayBuffer."
            )
        arguments = {
            "optimize_memory_usage": source.optimize_memory_usage,
            "handle_timeout_termination": source.handle_timeout_termination,
            **kwargs,
        }
        buffer = cls(
            source.buffer_size * source.n_envs,
            source.observation_space,
            source.action_space,
            device=device,
            n_envs=source.n_envs,
            **arguments,
        )
        size = source.buffer_size
        slot_bytes = sum(part.nbytes for part in _parts(_at(source.observations, 0)))
        with bar("converting", slot_bytes * source.size(), None) as update:
            for slot in _slots_by_age(source).tolist():
                obs: Any = source.observations
                following: Any = obs if source.optimize_memory_usage else source.next_observations
                after = (slot + 1) % size if source.optimize_memory_usage else slot
                buffer.pos = slot
                buffer.add(
                    _at(obs, slot),
                    _at(following, after),
                    source.actions[slot],
                    source.rewards[slot],
                    source.dones[slot],
                    [{"TimeLimit.truncated": bool(timeout)} for timeout in source.timeouts[slot]],
                )
                update(slot_bytes)
        buffer.pos, buffer.full = source.pos, source.full
        return buffer

    def to_minari(self, dataset_id: str, **kwargs: Any) -> MinariDataset:
        """A dataset of Minari on disk, an episode for each that the buffer holds, or holds a part of.

        An episode whose end is not in the buffer, because it goes on, ends with a truncation in the dataset, as does
        one that the environment left without a word. One whose beginning was overwritten begins later. Images are
        stored without loss.

        :param dataset_id: As Minari wants it: ``"game/name-v0"``.
        :param kwargs: Further arguments of ``minari.create_dataset_from_buffers``.
        """
        minari = _minari()
        given = {"observation_space": self.observation_space, "action_space": self.action_space, "jpeg_encoding": False}
        # It asks for a list, but takes one episode after the other.
        dataset: MinariDataset = minari.create_dataset_from_buffers(dataset_id, self._episodes(), **{**given, **kwargs})
        return dataset

    @classmethod
    def from_minari(
        cls,
        dataset: MinariDataset | str,
        device: th.device | str = "auto",
        buffer_size: int | None = None,
        **kwargs: Any,
    ) -> Self:
        """A buffer for one environment with the transitions of a dataset of Minari.

        :param dataset: The dataset, or its id.
        :param buffer_size: By default, the number of transitions in the dataset.
        :param kwargs: Further arguments of this class.
        """
        if isinstance(dataset, str):
            dataset = _minari().load_dataset(dataset)
        size = buffer_size or int(dataset.total_steps)
        buffer = cls(size, dataset.observation_space, dataset.action_space, device=device, n_envs=1, **kwargs)
        for episode in dataset.iterate_episodes():
            for step in range(len(episode.rewards)):
                terminated, truncated = bool(episode.terminations[step]), bool(episode.truncations[step])
                buffer.add(
                    _at(episode.observations, slice(step, step + 1)),
                    _at(episode.observations, slice(step + 1, step + 2)),
                    np.asarray(episode.actions[step : step + 1]),
                    np.asarray(episode.rewards[step : step + 1]),
                    np.array([terminated or truncated]),
                    [{"TimeLimit.truncated": truncated and not terminated}],
                )
        return buffer

    def _slots_by_age(self) -> npt.NDArray[np.int64]:
        slots = _slots_by_age(self)
        # With optimize_memory_usage, the oldest transition has lost its observation to the newest one.
        return slots[1:] if self.optimize_memory_usage and self.full else slots

    def _episodes(self) -> Iterator[Any]:
        """For Minari, one environment after the other."""
        from minari.data_collector import EpisodeBuffer

        slots = self._slots_by_age()
        for env in range(self.n_envs):
            for part in np.split(slots, np.flatnonzero(self.dones[slots, env]) + 1):
                envs = np.full(len(part), env)
                obs, next_obs = (_at(array, (part, envs)) for array in (self.observations, self.next_observations))
                # A reset that no done tells of is an end as well.
                breaks = np.flatnonzero(_differ(_at(next_obs, slice(None, -1)), _at(obs, slice(1, None)))) + 1
                for rows in np.split(np.arange(len(part)), breaks):
                    if not len(rows):
                        continue
                    truncations = self.timeouts[part[rows], env] > 0
                    terminations = (self.dones[part[rows], env] > 0) & ~truncations
                    truncations[-1] |= not terminations[-1]
                    yield EpisodeBuffer(
                        observations=_as_in_space(
                            _joined(_at(obs, rows), _at(next_obs, rows[-1:])), self.observation_space
                        ),
                        actions=_as_in_space(self.actions[part[rows], env], self.action_space),
                        rewards=self.rewards[part[rows], env],
                        terminations=terminations,
                        truncations=truncations,
                    )


def _minari() -> Any:
    if sys.version_info < (3, 11):
        raise ConfigurationError(
            "Datasets of Minari need Python 3.11: versions of Minari for older ones store images as JPEG, with loss."
        )
    return require("minari", "A dataset of Minari", "minari")


def _slots_by_age(buffer: ReplayBuffer) -> npt.NDArray[np.int64]:
    """Slots that hold a transition, oldest first."""
    oldest = buffer.pos if buffer.full else 0
    return (oldest + np.arange(buffer.size())) % buffer.buffer_size


def _at(observations: Any, key: Any) -> Any:
    if isinstance(observations, dict):
        return {name: array[key] for name, array in observations.items()}
    return observations[key]


def _parts(observations: Any) -> list[Any]:
    return list(observations.values()) if isinstance(observations, dict) else [observations]


def _put(observations: Any, slots: npt.NDArray[np.int64], values: Any) -> None:
    if isinstance(observations, dict):
        for name, array in observations.items():
            array[slots] = values[name]
    else:
        observations[slots] = values


def _differ(left: Any, right: Any) -> npt.NDArray[np.bool_]:
    """Which rows are not equal, NaN being equal to itself."""
    if isinstance(left, dict):
        parts = [_differ(array, right[name]) for name, array in left.items()]
        return np.logical_or.reduce(parts)  # type: ignore[no-any-return]
    same = (left == right) | ((left != left) & (right != right))
    return ~same.all(axis=tuple(range(1, same.ndim)))  # type: ignore[no-any-return]


def _joined(first: Any, last: Any) -> Any:
    if isinstance(first, dict):
        return {name: np.concatenate([array, last[name]]) for name, array in first.items()}
    return np.concatenate([first, last])


def _as_in_space(rows: Any, space: spaces.Space[Any]) -> Any:
    """SB3 keeps a number as an array of one and actions as rows; in their space they may have no axis, or several."""
    if isinstance(space, spaces.Dict):
        return {name: _as_in_space(rows[name], part) for name, part in space.spaces.items()}
    return rows.reshape(len(rows), *(space.shape or ())).astype(space.dtype, copy=False)
