"""A replay buffer that consists of several, one for each collector, and is sampled as if it were one."""

from __future__ import annotations

import copy
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
from sb3_extra_buffers.compressed.priorities import absolute_errors
from sb3_extra_buffers.compressed.prioritized_buffer import PrioritizedReplayBufferSamples
from sb3_extra_buffers.compressed.replay_buffer import CompressedDictReplayBuffer, CompressedReplayBuffer
from sb3_extra_buffers.compressed.segments import SegmentInfo
from sb3_extra_buffers.compressed.sequence_buffer import CompressedSequenceReplayBuffer
from sb3_extra_buffers.distributed.parts import Parts, Places, draw_uniformly
from sb3_extra_buffers.errors import ConfigurationError, EmptyBufferError
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
        self._join()
        first = self.parts[0]
        self.observation_space, self.action_space = observation_space, action_space
        self.obs_shape, self.action_dim, self.n_envs = first.obs_shape, first.action_dim, n_envs
        self.buffer_size = sum(part.buffer_size for part in self.parts)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination

    def _join(self) -> None:
        """To be called when the parts were replaced."""
        self._joined = Parts(self.parts, self.parts[0].device)

    @property
    def device(self) -> th.device:
        """Where batches go. SB3 assigns a new one after it has loaded a buffer."""
        return self._joined.outputs.device

    @device.setter
    def device(self, device: th.device) -> None:
        self._joined.outputs.device = device

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_joined"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._join()

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
        buffer._join()
        return buffer

    def memory_usage(self) -> MemoryUsage:
        """The memory that the contents of all parts take, by kind."""
        return MemoryUsage.of_parts([part.memory_usage() for part in self.parts])

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """A batch over all parts, each transition with the same probability, or in proportion to its priority."""
        if len(self.parts) == 1:
            return self.parts[0].sample(batch_size, env)
        with self.parts[0]._lock.held:
            if self._joined.is_prioritized:
                return self._sample_by_priority(batch_size, env)
            return self._joined.sample(draw_uniformly(self.parts, batch_size), env)

    def _sample_by_priority(self, batch_size: int, env: VecNormalize | None) -> PrioritizedReplayBufferSamples:
        trees = self._joined.trees
        total = float(trees.totals.cumsum()[-1])
        if total == 0:
            raise EmptyBufferError("The buffer is empty: add transitions before sampling from it.")
        numbers, found = trees.find((np.arange(batch_size) + np.random.random_sample(batch_size)) * total / batch_size)
        samples = self._joined.sample(Places(numbers, *np.divmod(found, self.n_envs)), env)
        priorities = trees.get(numbers, found)
        weights = (priorities.min(initial=np.inf) / priorities) ** self.beta
        weights_tensor = self.parts[0].to_torch(weights.astype(np.float32).reshape(-1, 1))
        return PrioritizedReplayBufferSamples._make([*samples, weights_tensor, found + numbers * self._stride])

    @property
    def _stride(self) -> int:
        """The indices of a part, for priorities, begin at a multiple of this."""
        return int(self.parts[0].buffer_size * self.n_envs)

    def update_priorities(self, indices: Indices, td_errors: th.Tensor | npt.ArrayLike) -> None:
        """Set the priorities of transitions of a batch from their TD errors."""
        first = self.parts[0]
        if len(self.parts) == 1:
            first.update_priorities(indices, td_errors)
            return
        errors = absolute_errors(td_errors).reshape(-1)
        if errors.shape != indices.shape:
            raise ConfigurationError(f"{len(indices)} transitions need {len(indices)} TD errors, not {len(errors)}.")
        numbers, own = np.divmod(indices, self._stride)
        if len(indices) and not 0 <= numbers.min() <= numbers.max() < len(self.parts):
            raise IndexError(
                f"There are {len(self.parts)} parts, but indices of part {numbers.min()} or {numbers.max()}."
            )
        priorities = errors + first.epsilon
        with first._lock.held:
            trees = self._joined.trees
            # An empty place keeps priority 0, so that it is never sampled.
            trees.set(numbers, own, np.where(trees.get(numbers, own) > 0, priorities**first.alpha, 0.0))
            largest = max(float(priorities.max(initial=0.0)), *(part.max_priority for part in self.parts))
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
