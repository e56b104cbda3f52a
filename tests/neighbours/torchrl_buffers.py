"""What the tests of TorchRL share: a game, a buffer of each storage, and comparisons between them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch as th

try:
    import torchrl.data as rl
except ModuleNotFoundError:
    pytest.skip("TorchRL is not installed; `make test-more` installs it", allow_module_level=True)

from tensordict import TensorDict

from sb3_extra_buffers.storage.observation_tensor import ObservationTensor
from sb3_extra_buffers.torchrl import CompressedStorage

STACK, SIZE = 4, 24


class Game:
    """Episodes of a few changing pixels, as a collector of TorchRL returns them."""

    def __init__(self, seed: int = 0, dtype: th.dtype = th.uint8) -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype = dtype
        self.episode = 0
        self.reset()

    def reset(self) -> None:
        frame = self.rng.integers(0, 256, (SIZE, SIZE))
        self.stack = [frame] * STACK

    def step(self) -> dict[str, Any]:
        before = np.stack(self.stack)
        frame = self.stack[-1].copy()
        y, x = self.rng.integers(0, SIZE - 3, 2)
        frame[y : y + 3, x : x + 3] = self.rng.integers(0, 256)
        self.stack = [*self.stack[1:], frame]
        done = self.rng.random() < 0.1
        found = {
            "pixels": th.from_numpy(before).to(self.dtype),
            "camera": {"depth": th.from_numpy(before[:1]).float() / 7, "position": th.randn(3)},
            "action": th.tensor(int(self.rng.integers(4))),
            "episode": th.tensor(self.episode),
            "next": {
                "pixels": th.from_numpy(np.stack(self.stack)).to(self.dtype),
                "camera": {"depth": th.from_numpy(np.stack(self.stack)[:1]).float() / 7, "position": th.randn(3)},
                "reward": th.from_numpy(self.rng.normal(size=1)).float(),
                "done": th.tensor([bool(done)]),
            },
        }
        if done:
            self.episode += 1
            self.reset()
        return found

    def steps(self, n: int) -> TensorDict:
        return th.stack([TensorDict(self.step(), []) for _ in range(n)])


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, th.Tensor):
        assert th.equal(found.clone(), expected)
        return
    assert found.shape == expected.shape
    keys = set(expected.keys(include_nested=True, leaves_only=True))
    assert set(found.keys(include_nested=True, leaves_only=True)) == keys
    for key in keys:
        assert found[key].dtype == expected[key].dtype, key
        assert th.equal(found[key].clone(), expected[key]), key


def both(size: int = 100, batch_size: int = 16, ours: dict[str, Any] | None = None, **arguments: Any) -> tuple:
    """A buffer of each storage; arguments that are callable are called for each."""
    buffers = []
    for make in (functools.partial(CompressedStorage, **(ours or {})), rl.LazyTensorStorage):
        given = {name: value() if callable(value) else value for name, value in arguments.items()}
        ndim = given.pop("ndim", 1)
        buffers.append(rl.TensorDictReplayBuffer(storage=make(size, ndim=ndim), batch_size=batch_size, **given))
    return tuple(buffers)


def sampled(buffers: tuple, seed: int) -> None:
    batches = []
    for buffer in buffers:
        th.manual_seed(seed)
        np.random.seed(seed)  # TorchRL draws by priority with it
        batches.append(buffer.sample())
    assert_equal(*batches)
    tensors = [value for value in batches[0].values(True, True) if isinstance(value, th.Tensor)]
    assert not any(isinstance(value, ObservationTensor) for value in tensors)


def filled(**arguments: Any) -> tuple:
    buffers = both(**arguments)
    game = Game(5)
    for n in (70, 50, 9):
        batch = game.steps(n)
        for buffer in buffers:
            buffer.extend(batch.clone())
    return (*buffers, game)


def new_buffer(size: int = 100) -> rl.TensorDictReplayBuffer:
    return rl.TensorDictReplayBuffer(storage=CompressedStorage(size), batch_size=16)
