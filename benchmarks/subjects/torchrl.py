"""TorchRL's replay buffer with its storages: tensors in memory, in mapped files, and a list of compressed items."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import torch as th
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.storages import CompressedListStorage

from benchmarks.recordings import Transition
from benchmarks.subjects.base import Array, Subject, Task

logging.getLogger("torchrl").setLevel(logging.WARNING)

Batch = dict[str, th.Tensor]


class Torchrl(Subject):
    distribution = "torchrl"

    def __init__(self, method: str, task: Task) -> None:
        super().__init__(method, task)
        self.buffer = self._make()

    def _make(self) -> TensorDictReplayBuffer:
        size = self.task.capacity
        if self.method == "tensor":
            storage = LazyTensorStorage(size)
        elif self.method == "memmap":
            storage = LazyMemmapStorage(size, scratch_dir=tempfile.mkdtemp())
        elif self.method == "compressed":
            storage = CompressedListStorage(size)
        else:
            raise ValueError(f"unknown storage {self.method!r}; known are tensor, memmap, compressed")
        return TensorDictReplayBuffer(storage=storage)

    def add(self, step: Transition) -> None:
        following = {
            "obs": th.from_numpy(step.next_obs),
            "reward": th.from_numpy(step.reward)[:, None],
            "done": th.from_numpy(step.done)[:, None],
        }
        fields = {"obs": th.from_numpy(step.obs), "action": th.from_numpy(step.action), "next": following}
        self.buffer.extend(TensorDict(fields, batch_size=[self.task.n_envs]))

    def sample(self, batch_size: int) -> Batch:
        batch = self.buffer.sample(batch_size)
        # The compressed storage returns a lazy stack: its items become one tensor only when a field is accessed.
        fields = ("obs", "action", ("next", "obs"), ("next", "reward"), ("next", "done"))
        return {" ".join(name) if isinstance(name, tuple) else name: batch[name] for name in fields}

    def observations(self, batch: Batch) -> tuple[Array, Array]:
        return batch["obs"].numpy(), batch["next obs"].numpy()

    def save(self, path: Path) -> None:
        self.buffer.dumps(path)

    def load(self, path: Path) -> None:
        self.buffer = self._make()
        self.buffer.loads(path)
