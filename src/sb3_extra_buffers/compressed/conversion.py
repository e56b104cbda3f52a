"""Replay buffers to and from SB3's buffers, Minari's datasets and plain arrays.

The methods of :class:`~sb3_extra_buffers.compressed.replay_buffer.CompressedReplayBuffer` say what each function does.
None of them decodes a whole buffer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

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

Buffer = TypeVar("Buffer", bound=ReplayBuffer)

_SLOTS_AT_ONCE = 256
_FIELDS = ("actions", "rewards", "dones", "timeouts")


def to_numpy(buffer: ReplayBuffer, chunk_size: int) -> Iterator[dict[str, Any]]:
    slots = _complete_slots(buffer)
    for start in range(0, len(slots), chunk_size):
        chosen = slots[start : start + chunk_size]
        yield {
            "observations": _at(buffer.observations, chosen),
            "next_observations": _at(buffer.next_observations, chosen),
            **{name: getattr(buffer, name)[chosen] for name in _FIELDS},
        }


def to_sb3(buffer: ReplayBuffer) -> ReplayBuffer:
    is_dict = isinstance(buffer.observation_space, spaces.Dict)
    optimize = buffer.optimize_memory_usage and not is_dict  # which SB3's Dict buffer does not have
    plain = (DictReplayBuffer if is_dict else ReplayBuffer)(
        buffer.buffer_size * buffer.n_envs,
        buffer.observation_space,  # type: ignore[arg-type]  # a Dict space for the Dict buffer
        buffer.action_space,
        buffer.device,
        n_envs=buffer.n_envs,
        optimize_memory_usage=optimize,
        handle_timeout_termination=buffer.handle_timeout_termination,
    )
    for name in _FIELDS:
        getattr(plain, name)[:] = getattr(buffer, name)
    # With optimize_memory_usage, the next observation of the newest transition is one slot further.
    used = buffer.buffer_size if buffer.full else min(buffer.pos + int(optimize), buffer.buffer_size)
    for start in range(0, used, _SLOTS_AT_ONCE):
        slots = np.arange(start, min(start + _SLOTS_AT_ONCE, used))
        _put(plain.observations, slots, _at(buffer.observations, slots))
        if not optimize:
            _put(plain.next_observations, slots, _at(buffer.next_observations, slots))
    plain.pos, plain.full = buffer.pos, buffer.full
    return plain


def from_sb3(cls: type[Buffer], source: ReplayBuffer | str | Path, **arguments: Any) -> Buffer:
    if not isinstance(source, ReplayBuffer):
        source = load_from_pkl(source)
    if not isinstance(source, ReplayBuffer) or isinstance(source, HerReplayBuffer):
        raise ConfigurationError(
            f"A {type(source).__name__} cannot be converted, only SB3's ReplayBuffer and DictReplayBuffer."
        )
    for name in ("optimize_memory_usage", "handle_timeout_termination"):
        arguments.setdefault(name, getattr(source, name))
    size, n_envs = source.buffer_size, source.n_envs
    buffer = cls(size * n_envs, source.observation_space, source.action_space, n_envs=n_envs, **arguments)
    observations: Any = source.observations
    following: Any = observations if source.optimize_memory_usage else source.next_observations
    shift = 1 if source.optimize_memory_usage else 0
    parts = observations.values() if isinstance(observations, dict) else [observations]
    slot_bytes = sum(part[0].nbytes for part in parts)
    with bar("converting", slot_bytes * source.size(), None) as update:
        for slot in _slots_by_age(source).tolist():
            buffer.pos = slot
            buffer.add(
                _at(observations, slot),
                _at(following, (slot + shift) % size),
                source.actions[slot],
                source.rewards[slot],
                source.dones[slot],
                [{"TimeLimit.truncated": bool(timeout)} for timeout in source.timeouts[slot]],
            )
            update(slot_bytes)
    buffer.pos, buffer.full = source.pos, source.full
    return buffer


def to_minari(buffer: ReplayBuffer, dataset_id: str, **arguments: Any) -> MinariDataset:
    minari = _minari()
    given = {"observation_space": buffer.observation_space, "action_space": buffer.action_space, "jpeg_encoding": False}
    # Its annotation asks for a list of episodes, but it takes one after the other.
    dataset: MinariDataset = minari.create_dataset_from_buffers(dataset_id, _episodes(buffer), **{**given, **arguments})
    return dataset


def from_minari(
    cls: type[Buffer], dataset: MinariDataset | str, buffer_size: int | None, device: th.device | str, **arguments: Any
) -> Buffer:
    if isinstance(dataset, str):
        dataset = _minari().load_dataset(dataset)
    size = buffer_size or int(dataset.total_steps)
    buffer = cls(size, dataset.observation_space, dataset.action_space, device=device, n_envs=1, **arguments)
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


def _minari() -> Any:
    if sys.version_info < (3, 11):
        raise ConfigurationError(
            "Datasets of Minari need Python 3.11: versions of Minari for older ones store images as JPEG, with loss."
        )
    return require("minari", "A dataset of Minari", "minari")


def _episodes(buffer: ReplayBuffer) -> Iterator[Any]:
    """Minari's episodes, one environment after the other."""
    from minari.data_collector import EpisodeBuffer

    slots = _complete_slots(buffer)
    for env in range(buffer.n_envs):
        for part in np.split(slots, np.flatnonzero(buffer.dones[slots, env]) + 1):
            envs = np.full(len(part), env)
            obs, next_obs = (_at(array, (part, envs)) for array in (buffer.observations, buffer.next_observations))
            # A reset without a done also ends an episode.
            breaks = np.flatnonzero(_differ(_at(next_obs, slice(None, -1)), _at(obs, slice(1, None)))) + 1
            for rows in np.split(np.arange(len(part)), breaks):
                if not len(rows):
                    continue
                where = part[rows], env
                truncations = buffer.timeouts[where] > 0
                terminations = (buffer.dones[where] > 0) & ~truncations
                truncations[-1] |= not terminations[-1]
                observations = _for_each_key(_concatenated, _at(obs, rows), _at(next_obs, rows[-1:]))
                yield EpisodeBuffer(
                    observations=_as_in_space(observations, buffer.observation_space),
                    actions=_as_in_space(buffer.actions[where], buffer.action_space),
                    rewards=buffer.rewards[where],
                    terminations=terminations,
                    truncations=truncations,
                )


def _slots_by_age(buffer: ReplayBuffer) -> npt.NDArray[np.int64]:
    """Slots that hold a transition, oldest first."""
    oldest = buffer.pos if buffer.full else 0
    return (oldest + np.arange(buffer.size())) % buffer.buffer_size


def _complete_slots(buffer: ReplayBuffer) -> npt.NDArray[np.int64]:
    """The same without the oldest, if ``optimize_memory_usage`` has overwritten its observation."""
    slots = _slots_by_age(buffer)
    return slots[1:] if buffer.optimize_memory_usage and buffer.full else slots


def _for_each_key(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """``function`` of arrays, or of the arrays of each key."""
    if isinstance(first, dict):
        return {key: function(part, *(other[key] for other in others)) for key, part in first.items()}
    return function(first, *others)


def _at(observations: Any, key: Any) -> Any:
    return _for_each_key(lambda array: array[key], observations)


def _put(observations: Any, slots: npt.NDArray[np.int64], values: Any) -> None:
    _for_each_key(lambda array, part: array.__setitem__(slots, part), observations, values)


def _concatenated(first: npt.NDArray[Any], last: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate([first, last])


def _differ(left: Any, right: Any) -> npt.NDArray[np.bool_]:
    """Which rows are not equal, NaN being equal to itself."""
    if isinstance(left, dict):
        return np.logical_or.reduce([_differ(array, right[key]) for key, array in left.items()])  # type: ignore[no-any-return]
    same = (left == right) | ((left != left) & (right != right))
    return ~same.all(axis=tuple(range(1, same.ndim)))  # type: ignore[no-any-return]


def _as_in_space(rows: Any, space: spaces.Space[Any]) -> Any:
    """Rows in the shape and dtype of their space: SB3 stores a number as an array of one, and actions flat."""
    if isinstance(space, spaces.Dict):
        return {key: _as_in_space(rows[key], part) for key, part in space.spaces.items()}
    return rows.reshape(len(rows), *(space.shape or ())).astype(space.dtype, copy=False)
