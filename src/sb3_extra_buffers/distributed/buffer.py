"""A replay buffer of several parts, one for each collector, that are sampled together."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
from sb3_extra_buffers.compressed.replay_buffer import CompressedReplayBuffer
from sb3_extra_buffers.compressed.segments import SegmentInfo
from sb3_extra_buffers.compressed.sequence_buffer import CompressedSequenceReplayBuffer
from sb3_extra_buffers.distributed.limits import checked_number
from sb3_extra_buffers.distributed.manifest import load_parts, save_parts
from sb3_extra_buffers.distributed.parts import (
    Parts,
    Places,
    default_part_class,
    draw_uniformly,
    indices_of,
    numbers_and_places,
)
from sb3_extra_buffers.distributed.remote import Shards
from sb3_extra_buffers.distributed.shard import ShardPlan
from sb3_extra_buffers.distributed.shard_transport import LocalShards, ShardTransport
from sb3_extra_buffers.errors import ConfigurationError, EmptyBufferError
from sb3_extra_buffers.storage.outputs import OutputPool
from sb3_extra_buffers.storage.usage import MemoryUsage

if TYPE_CHECKING:
    from typing_extensions import Self

_SPARE_BATCHES = 4
"""How many batches the learner keeps memory for, besides those requested ahead."""


class ShardedReplayBuffer(ReplayBuffer):
    """A replay buffer that consists of compressed replay buffers, its *parts*, and samples from all of them.

    SB3's buffers store one step of all environments at a time, but collectors do not run in lockstep. So each collector
    has a part, to which its segments are appended. With a single part, batches are the same as with ``buffer_class``.

    :param buffer_size: Transitions of all parts together.
    :param n_envs: Environments of each part.
    :param parts: Number of parts. By default 1, or one per shard.
    :param placement: ``"learner"`` keeps all parts in the memory of this process. ``"shards"`` keeps them in other
        processes, on this machine or others, for buffers that do not fit into one machine.
    :param buffer_class: The class of each part: ``CompressedReplayBuffer``, or one derived from it, such as
        ``CompressedNStepReplayBuffer`` and ``CompressedPrioritizedReplayBuffer``. By default ``CompressedReplayBuffer``
        or ``CompressedDictReplayBuffer``, depending on the observation space.
    :param path: Folder for parts on disk: for a single part with ``storage="mmap"``, or for all parts in shards. A dead
        shard is restored from this folder, so all machines on which shards may be restarted must have access to it.
    :param shards: Number of processes that share the parts. This argument and those up to ``in_process`` need
        ``placement="shards"``.
    :param prefetch: Number of batches to request ahead. Transitions added after a request are not in its batch.
    :param on_loss: When a shard dies, ``"report"`` logs a warning and continues without its transitions, and
        ``"raise"`` raises a ``WorkerError``.
    :param ray: Arguments of ``ray.init``, such as ``{"address": "auto"}``. Without an address, Ray is started on this
        machine.
    :param shard_options: Arguments of ``ray.remote`` for shards.
    :param in_process: Run the shards in this process, without Ray. For tests.
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
        parts: int | None = None,
        placement: Literal["learner", "shards"] = "learner",
        buffer_class: type[CompressedReplayBuffer] | None = None,
        path: str | Path | None = None,
        shards: int = 2,
        prefetch: int = 4,
        on_loss: Literal["report", "raise"] = "report",
        ray: Mapping[str, Any] | None = None,
        shard_options: Mapping[str, Any] | None = None,
        in_process: bool = False,
        **options: Any,
    ) -> None:
        # Does not call SB3's constructor, which would allocate memory for all transitions.
        is_remote = placement == "shards"
        if placement not in ("learner", "shards"):
            raise ConfigurationError(f"placement must be 'learner' or 'shards', not {placement!r}.")
        if on_loss not in ("report", "raise"):
            raise ConfigurationError(f"on_loss must be 'report' or 'raise', not {on_loss!r}.")
        shards, prefetch = checked_number("shards", shards), checked_number("prefetch", prefetch)
        parts = (shards if is_remote else 1) if parts is None else checked_number("parts", parts)
        self.part_class = default_part_class(observation_space) if buffer_class is None else _checked(buffer_class)
        if is_remote and options.get("storage", "memory") != "memory":
            raise ConfigurationError("With placement='shards', leave out storage: pass a path to keep shards on disk.")
        if not is_remote and path is not None:
            if parts > 1:
                raise ConfigurationError(
                    f"In this process, only a single part can be on disk, not {parts}. Use parts=1, or "
                    "placement='shards'."
                )
            options["path"] = path
        arguments: dict[str, Any] = {
            "buffer_size": max(buffer_size // parts, n_envs),
            "observation_space": observation_space,
            "action_space": action_space,
            "n_envs": n_envs,
            "optimize_memory_usage": optimize_memory_usage,
            "handle_timeout_termination": handle_timeout_termination,
            **options,
        }
        self.parts: list[Any]
        self._template: Any
        self._shards: Shards | None = None
        if not is_remote:
            self._use([self.part_class(**arguments, device=device) for _ in range(parts)])
        else:
            transport: ShardTransport = LocalShards()
            if not in_process:
                from sb3_extra_buffers.distributed.ray_transport import RayShards

                transport = RayShards(ray, shard_options)
            folder = None if path is None else str(Path(path).absolute())
            plans = [
                ShardPlan(self.part_class, arguments, numbers.tolist(), folder, prefetch + _SPARE_BATCHES)
                for numbers in np.array_split(np.arange(parts), min(shards, parts))
            ]
            self._template = self.part_class(**{**arguments, "buffer_size": n_envs}, device=device)
            self._shards = Shards(transport, plans, self._template, prefetch, on_loss)
            weakref.finalize(self, self._shards.stop)
            self.parts = list(self._shards.parts)
            self._describe()
        self.observation_space, self.action_space, self.n_envs = observation_space, action_space, n_envs
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination

    def _use(self, parts: list[Any]) -> None:
        """Use these parts, which are in the memory of this process."""
        self.parts, self._template = parts, parts[0]
        self._joined = Parts(parts, parts[0].device)
        self._describe()

    def _describe(self) -> None:
        self.obs_shape, self.action_dim = self._template.obs_shape, self._template.action_dim
        self.buffer_size = sum(part.buffer_size for part in self.parts)

    @property
    def device(self) -> th.device:
        """The device of batches. SB3 assigns it after it has loaded a buffer."""
        return self._outputs.device

    @device.setter
    def device(self, device: th.device) -> None:
        self._outputs.device = device

    @property
    def _outputs(self) -> OutputPool:
        return self._joined.outputs if self._shards is None else self._shards.outputs

    def __getstate__(self) -> dict[str, Any]:
        if self._shards is not None:
            raise ConfigurationError(
                "A buffer in shards cannot be pickled or copied, because it may not fit into this process. Use "
                "save(folder)."
            )
        return {name: value for name, value in vars(self).items() if name not in ("_joined", "_template")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._use(self.parts)

    def __copy__(self) -> ShardedReplayBuffer:
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        where = "in this process" if self._shards is None else "in shards"
        return f"{type(self).__name__}({len(self.parts)} parts {where}: {self._template!r}, ...)"

    def size(self) -> int:
        """The number of steps stored in all parts."""
        self._send_added()
        return sum(part.size() for part in self.parts)

    @property
    def pos(self) -> int:  # type: ignore[override]  # the parts decide
        """The position of a single part. With several parts, it only tells SB3 whether the buffer is empty."""
        self._send_added()
        return int(self.parts[0].pos) if len(self.parts) == 1 else self.size() % self.buffer_size

    @property
    def full(self) -> bool:  # type: ignore[override]  # the parts decide
        self._send_added()
        return all(part.full for part in self.parts)

    @property
    def dones(self) -> _NewestDones:  # type: ignore[override]  # the parts have the arrays
        """Where SB3 marks the newest step as done, if ``learn`` is called again with ``optimize_memory_usage``."""
        return _NewestDones(self)

    def add(self, *step: Any, part: int = 0) -> None:
        """Add a step of all environments of one part."""
        self.parts[part].add(*step)

    def _send_added(self) -> None:
        if self._shards is not None:
            self._shards.send_added()

    def ingest_segment(self, data: bytes | npt.NDArray[np.uint8], part: int = 0) -> SegmentInfo:
        """Append a segment to a part; see :meth:`.CompressedReplayBuffer.ingest_segment`."""
        info: SegmentInfo = self.parts[part].ingest_segment(data)
        return info

    def reset(self) -> None:
        if self._shards is not None:
            self._shards.reset()
            return
        for part in self.parts:
            part.reset()

    def _end_episodes(self) -> None:
        """Mark the newest steps of all parts as the ends of their episodes."""
        self._send_added()
        for part in self.parts:
            part._end_episodes()

    def check(self) -> None:
        """Check all invariants of all parts."""
        if self._shards is not None:
            self._shards.ask_all("check")
            return
        for part in self.parts:
            part.check()

    def close(self) -> None:
        """Stop the shards. Parts on disk are flushed first."""
        if self._shards is None:
            for part in self.parts:
                part.close()
        elif not self._shards.is_closed:
            self._shards.close()

    @property
    def shard_statistics(self) -> dict[str, float]:
        """The number of transitions lost with dead shards, and the fraction lost with the last one."""
        if self._shards is None:
            return {}
        return {"transitions_lost": self._shards.n_lost, "fraction_lost": self._shards.lost_fraction}

    def save(self, path: str | Path) -> None:
        """Save all parts to files in a folder, without pickle.

        If a process is killed meanwhile, the folder still holds the last complete save. Shards write the files of their
        parts, so all of their machines must have access to the folder. Shards that die later are restored from it.
        """
        self._send_added()
        save_parts(self, Path(path).absolute())

    @classmethod
    def load(cls, path: str | Path, device: th.device | str = "auto", **options: Any) -> Self:
        """Load a buffer that :meth:`save` wrote. Safe for untrusted files.

        :param options: ``placement`` and the arguments for shards except ``path``, because loaded shards are in memory.
            They may differ from those of the saved buffer, which decides everything else.
        """
        loaded: Self = load_parts(cls, Path(path).absolute(), device, options)
        return loaded

    def memory_usage(self) -> MemoryUsage:
        """The memory that the contents of all parts take, by kind."""
        if self._shards is not None:
            return MemoryUsage.of_parts(self._shards.ask_all("memory_usage"))
        return MemoryUsage.of_parts([part.memory_usage() for part in self.parts])

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """A batch over all parts, drawn uniformly or by priority."""
        if self._shards is not None:
            return self._shards.sample(batch_size, env)
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
        return self._joined.weighted(samples, trees.get(numbers, found), indices_of(self.parts, numbers, found))

    def update_priorities(self, indices: Indices, td_errors: th.Tensor | npt.ArrayLike) -> None:
        """Set the priorities of a batch's transitions from their TD errors."""
        first = self.parts[0]
        if len(self.parts) == 1 and self._shards is None:
            first.update_priorities(indices, td_errors)
            return
        errors = absolute_errors(td_errors).reshape(-1)
        if errors.shape != indices.shape:
            raise ConfigurationError(f"{len(indices)} transitions need {len(indices)} TD errors, not {len(errors)}.")
        if self._shards is not None:
            self._shards.update(indices, errors)
            return
        numbers, own = numbers_and_places(self.parts, indices)
        priorities = errors + first.epsilon
        with first._lock.held:
            largest = max(float(priorities.max(initial=0.0)), self.max_priority)
            self._joined.set_priorities(numbers, own, priorities, largest)

    @property
    def max_priority(self) -> float:
        """The largest priority so far, which new transitions get."""
        if self._shards is not None:
            return self._shards.max_priority
        return max(getattr(part, "max_priority", 1.0) for part in self.parts)

    @property
    def beta(self) -> float:
        """The exponent of the importance-sampling weights."""
        return float(self._template.beta)

    @property
    def progress_remaining(self) -> float:
        """The remaining fraction of the training, for a schedule of ``beta``. The algorithm has to update it."""
        return float(self._template.progress_remaining)

    @progress_remaining.setter
    def progress_remaining(self, value: float) -> None:
        for part in [self._template] if self._shards is not None else self.parts:
            part.progress_remaining = value


class _NewestDones:
    """The ``dones`` of the newest step of every part. They can only be set."""

    def __init__(self, buffer: ShardedReplayBuffer) -> None:
        self._buffer = buffer

    def __setitem__(self, slot: int, value: bool) -> None:
        size = self._buffer.buffer_size
        newest = (self._buffer.pos - 1) % size
        if slot % size != newest or not value:
            raise IndexError(
                f"dones[{slot!r}] = {value!r} is not possible: only the newest step, dones[{newest}], can be marked as "
                "done. Other steps are in the parts."
            )
        self._buffer._end_episodes()


def _checked(buffer_class: type[CompressedReplayBuffer]) -> type[CompressedReplayBuffer]:
    without = (CompressedHerReplayBuffer, CompressedSequenceReplayBuffer)
    if CompressedReplayBuffer not in buffer_class.__mro__ or any(cls in buffer_class.__mro__ for cls in without):
        raise ConfigurationError(
            "buffer_class must be CompressedReplayBuffer or derived from it, but not a class for hindsight experience "
            f"replay or sequences. It is {buffer_class.__name__}."
        )
    return buffer_class
