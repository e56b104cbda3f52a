"""A replay buffer that consists of several, one for each collector, and is sampled as if it were one."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.compressed.her_buffer import CompressedHerReplayBuffer
from sb3_extra_buffers.compressed.nstep_buffer import CompressedNStepReplayBuffer
from sb3_extra_buffers.compressed.prioritized_buffer import (
    CompressedPrioritizedReplayBuffer,
    PrioritizedReplayBufferSamples,
)
from sb3_extra_buffers.compressed.replay_buffer import CompressedDictReplayBuffer, CompressedReplayBuffer
from sb3_extra_buffers.compressed.segments import SegmentInfo
from sb3_extra_buffers.compressed.sequence_buffer import CompressedSequenceReplayBuffer
from sb3_extra_buffers.errors import ConfigurationError, EmptyBufferError
from sb3_extra_buffers.storage.outputs import OutputPool
from sb3_extra_buffers.storage.usage import MemoryUsage


class ShardedReplayBuffer(ReplayBuffer):
    """Several compressed replay buffers, which are sampled together.

    SB3's buffers store one step of all environments at a time. Collectors do not run in step, so each has a buffer of
    its own, to which its segments are appended. With one part, this class returns the same batches as ``buffer_class``.

    :param buffer_size: Transitions of all parts together.
    :param n_envs: The environments of each part.
    :param parts: How many buffers there are.
    :param placement: ``"learner"``: all parts are in the memory of this process.
    :param buffer_class: The class of each part: ``CompressedReplayBuffer``, or one derived from it, such as
        ``CompressedNStepReplayBuffer`` and ``CompressedPrioritizedReplayBuffer``. By default ``CompressedReplayBuffer``
        or ``CompressedDictReplayBuffer``, depending on the observation space.
    :param options: Further arguments of ``buffer_class``.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        parts: int = 1,
        placement: Literal["learner"] = "learner",
        buffer_class: type[CompressedReplayBuffer] | None = None,
        **options: Any,
    ) -> None:
        # Not SB3's constructor, which would allocate memory for all transitions.
        if placement != "learner":
            raise ConfigurationError(f"placement must be 'learner', not {placement!r}.")
        if parts < 1:
            raise ConfigurationError(f"parts must be at least 1, not {parts}.")
        if buffer_class is None:
            is_dict = isinstance(observation_space, spaces.Dict)
            buffer_class = CompressedDictReplayBuffer if is_dict else CompressedReplayBuffer
        without = (CompressedHerReplayBuffer, CompressedSequenceReplayBuffer)
        if CompressedReplayBuffer not in buffer_class.__mro__ or any(cls in buffer_class.__mro__ for cls in without):
            raise ConfigurationError(
                "buffer_class must be derived from CompressedReplayBuffer, and be neither for hindsight experience "
                f"replay nor for sequences, not {buffer_class.__name__}."
            )
        if options.get("storage", "memory") != "memory" and parts > 1:
            raise ConfigurationError("storage='mmap' is for a single part: several would use the same folder.")
        self.parts: list[Any] = [
            buffer_class(
                max(buffer_size // parts, n_envs),
                observation_space,
                action_space,
                device=device,
                n_envs=n_envs,
                optimize_memory_usage=optimize_memory_usage,
                handle_timeout_termination=handle_timeout_termination,
                **options,
            )
            for _ in range(parts)
        ]
        self._share_outputs()
        first = self.parts[0]
        self.observation_space, self.action_space = observation_space, action_space
        self.obs_shape, self.action_dim, self.n_envs = first.obs_shape, first.action_dim, n_envs
        self.buffer_size = sum(part.buffer_size for part in self.parts)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination

    def _share_outputs(self) -> None:
        self._outputs = _SharedOutputs(self.parts[0].device)
        for part in self.parts:
            part._outputs = self._outputs
            for store in part._stores.values():
                store.outputs = self._outputs

    @property
    def device(self) -> th.device:
        """Where batches go. SB3 assigns a new one after it has loaded a buffer."""
        return self._outputs.device

    @device.setter
    def device(self, device: th.device) -> None:
        self._outputs.device = device

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_outputs"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._share_outputs()

    def __copy__(self) -> ShardedReplayBuffer:
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.parts)} parts: {self.parts[0]!r}, ...)"

    def size(self) -> int:
        """The number of stored steps of all parts."""
        return sum(part.size() for part in self.parts)

    @property
    def pos(self) -> int:  # type: ignore[override]  # the parts decide
        """SB3 only asks whether it is 0. With several parts, the number of steps."""
        return int(self.parts[0].pos) if len(self.parts) == 1 else self.size() % self.buffer_size

    @property
    def full(self) -> bool:  # type: ignore[override]  # the parts decide
        return all(part.full for part in self.parts)

    def add(self, *step: Any, part: int = 0) -> None:
        """Add a step of all environments of one part."""
        self.parts[part].add(*step)

    def ingest_segment(self, data: bytes | npt.NDArray[np.uint8], part: int = 0) -> SegmentInfo:
        """Append a segment to a part; see :meth:`CompressedReplayBuffer.ingest_segment`."""
        info: SegmentInfo = self.parts[part].ingest_segment(data)
        return info

    def reset(self) -> None:
        for part in self.parts:
            part.reset()

    def check(self) -> None:
        """Check all invariants of all parts."""
        for part in self.parts:
            part.check()

    def save(self, path: str | Path) -> None:
        """Save all parts to files in a folder, without pickle."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        for number, part in enumerate(self.parts):
            part.save(folder / f"part{number}")

    @classmethod
    def load(cls, path: str | Path, device: th.device | str = "auto") -> ShardedReplayBuffer:
        """Load what :meth:`save` wrote. Safe for untrusted files."""
        folder = Path(path)
        n_parts = len(list(folder.glob("part*")))
        if not n_parts:
            raise ConfigurationError(f"{folder} holds no parts of a {cls.__name__}.")
        parts = [CompressedReplayBuffer.load(folder / f"part{number}", device) for number in range(n_parts)]
        first = parts[0]
        buffer = cls(
            first.n_envs,
            first.observation_space,
            first.action_space,
            device,
            first.n_envs,
            first.optimize_memory_usage,
            first.handle_timeout_termination,
            buffer_class=type(first),
        )
        buffer.parts = list(parts)
        buffer.buffer_size = sum(part.buffer_size for part in parts)
        buffer._share_outputs()
        return buffer

    def memory_usage(self) -> MemoryUsage:
        """The memory that the contents of all parts take, by kind."""
        return MemoryUsage.of_parts([part.memory_usage() for part in self.parts])

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """A batch over all parts, each transition with the same probability, or in proportion to its priority."""
        if len(self.parts) == 1:
            return self.parts[0].sample(batch_size, env)
        if isinstance(self.parts[0], CompressedPrioritizedReplayBuffer):
            return self._sample_by_priority(batch_size, env)
        counts = np.array([_n_slots(part) for part in self.parts]) * self.n_envs
        ends = np.cumsum(counts)
        if ends[-1] == 0:
            raise EmptyBufferError("The buffer is empty: add transitions before sampling from it.")
        # Sorted by part. The order of transitions in a batch does not matter, and each part can write its own range.
        drawn = np.sort(np.random.randint(0, ends[-1], size=batch_size))
        numbers = np.searchsorted(ends, drawn, side="right")
        places = []
        for number, part in enumerate(self.parts):
            mine = drawn[numbers == number] - (ends[number] - counts[number])
            slots, envs = np.divmod(mine, self.n_envs)
            if part.optimize_memory_usage and part.full:
                slots = (slots + part.pos + 1) % part.buffer_size
            places.append((slots, envs))
        return self._samples_at(places, env)

    def _sample_by_priority(self, batch_size: int, env: VecNormalize | None) -> PrioritizedReplayBufferSamples:
        totals = np.array([part._tree.total for part in self.parts])
        ends = np.cumsum(totals)
        if ends[-1] == 0:
            raise EmptyBufferError("The buffer is empty: add transitions before sampling from it.")
        heights = (np.arange(batch_size) + np.random.random_sample(batch_size)) * ends[-1] / batch_size
        numbers = np.minimum(np.searchsorted(ends, heights, side="right"), np.flatnonzero(totals)[-1])
        places, indices, priorities = [], [], []
        for number, part in enumerate(self.parts):
            found = part._tree.find(heights[numbers == number] - (ends[number] - totals[number]))
            places.append(np.divmod(found, self.n_envs))
            indices.append(found + number * self._stride)
            priorities.append(part._tree[found])
        samples = self._samples_at(places, env)
        found_priorities = np.concatenate(priorities)
        weights = (found_priorities.min(initial=np.inf) / found_priorities) ** self.parts[0].beta
        weights_tensor = self.parts[0].to_torch(weights.astype(np.float32).reshape(-1, 1))
        return PrioritizedReplayBufferSamples._make([*samples, weights_tensor, np.concatenate(indices)])

    @property
    def _stride(self) -> int:
        """The indices of a part, for priorities, begin at a multiple of this."""
        return int(self.parts[0].buffer_size * self.n_envs)

    def update_priorities(self, indices: Indices, td_errors: th.Tensor | npt.ArrayLike) -> None:
        """Set the priorities of transitions of a batch from their TD errors."""
        errors = td_errors.detach().cpu().numpy() if isinstance(td_errors, th.Tensor) else np.asarray(td_errors)
        numbers, own = np.divmod(indices, self._stride)
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            self.parts[number].update_priorities(own[mine], errors.reshape(-1)[mine])
        largest = max(part.max_priority for part in self.parts)
        for part in self.parts:
            part.max_priority = largest

    @property
    def beta(self) -> float:
        """The exponent of the importance-sampling weights."""
        return float(self.parts[0].beta)

    @property
    def progress_remaining(self) -> float:
        """The argument of a schedule for beta. The algorithm has to update it."""
        return float(self.parts[0].progress_remaining)

    @progress_remaining.setter
    def progress_remaining(self, value: float) -> None:
        for part in self.parts:
            part.progress_remaining = value

    def _samples_at(self, places: Sequence[tuple[Indices, Indices]], env: VecNormalize | None) -> Any:
        """One batch from places in all parts."""
        first = self.parts[0]
        is_prioritized = isinstance(first, CompressedPrioritizedReplayBuffer)
        if not isinstance(first, CompressedNStepReplayBuffer) or (is_prioritized and first.n_steps == 1):
            return self._gathered(places, env)
        self._outputs.begin(sum(len(slots) for slots, _ in places))
        try:
            samples = []
            for part, (slots, envs) in zip(self.parts, places, strict=True):
                if len(slots):
                    self._outputs.next_part(len(slots))
                    samples.append(part._samples_at(slots, envs, env))
            return type(samples[0])._make(map(self._joined, zip(*samples, strict=True)))
        finally:
            self._outputs.end()

    def _gathered(self, places: Sequence[tuple[Indices, Indices]], env: VecNormalize | None) -> Any:
        """The same for single steps: each part writes its range of the batch."""
        first, ends = self.parts[0], np.cumsum([len(slots) for slots, _ in places]).tolist()
        outs = {
            key: [self._outputs.take((ends[-1], *store.shape), store.stored_dtype, self.device) for _ in range(2)]
            for key, store in first._stores.items()
        }
        fields: tuple[list[Any], ...] = ([], [], [])
        for part, (slots, envs), end in zip(self.parts, places, ends, strict=True):
            if len(slots) == 0:
                continue
            rows = slice(end - len(slots), end)
            following = (0, (slots + 1) % part.buffer_size) if part.optimize_memory_usage else (1, slots)
            with part._lock.held:
                for key, store in part._stores.items():
                    store.fill([(0, slots), following], envs, [out[rows] for out in outs[key]])
                where = slots * self.n_envs + envs
                fields[0].append(part.actions.reshape(-1, self.action_dim).take(where, axis=0))
                fields[1].append(part._dones_at(where))
                fields[2].append(part.rewards.reshape(-1, 1).take(where, axis=0))
        pairs = {key: store.converted(outs[key]) for key, store in first._stores.items()}
        return first._batch_of(pairs, *map(np.concatenate, fields), env)

    def _joined(self, pieces: Sequence[Any]) -> Any:
        """The pieces of one field, one for each part, as one tensor."""
        if isinstance(pieces[0], dict):
            return {key: self._joined([piece[key] for piece in pieces]) for key in pieces[0]}
        if pieces[0] is None:
            return None
        whole = self._outputs.whole(pieces[0])
        return th.cat(list(pieces)) if whole is None else whole


def _n_slots(part: Any) -> int:
    """How many slots can be sampled."""
    return int(part.size() - (part.optimize_memory_usage and part.full))


class _SharedOutputs(OutputPool):
    """Memory for batches in which each part writes a range, so that nothing has to be joined afterwards."""

    def __init__(self, device: th.device) -> None:
        super().__init__()
        self.device = device
        self._arrays: list[npt.NDArray[Any]] = []
        self.end()

    def begin(self, n_rows: int) -> None:
        self._n_rows, self._first, self._size, self._arrays = n_rows, 0, 0, []

    def next_part(self, size: int) -> None:
        """The next arrays are for a part with so many rows."""
        self._first, self._size, self._taken = self._first + self._size, size, 0

    def end(self) -> None:
        self._n_rows, self._first, self._size, self._taken = 0, 0, 0, 0
        self._arrays = []

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: th.device) -> npt.NDArray[Any]:
        if not self._n_rows:
            return super().take(shape, dtype, device)
        if self._taken == len(self._arrays):
            self._arrays.append(super().take((self._n_rows, *shape[1:]), dtype, device))
        whole = self._arrays[self._taken]
        self._taken += 1
        # Not a slice: its base would not be the lease, without which to_tensor() copies.
        offset = self._first * math.prod(shape[1:]) * dtype.itemsize
        lease: Any = whole.base
        return np.ndarray(shape, dtype, buffer=lease, offset=offset)

    def whole(self, piece: th.Tensor) -> th.Tensor | None:
        """The tensor of all parts, if ``piece`` is the first range of one of the arrays."""
        if piece.device.type != "cpu":
            return None
        for array in self._arrays:
            if array.size and array.ctypes.data == piece.data_ptr():
                return self.to_tensor(array, self.device)
        return None
