"""``verify=True`` on a device: what kernels and torch rebuild is compared with a checksum of what was stored."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer, GpuRolloutBuffer
from tests.transitions import play

IMAGES = spaces.Box(0, 255, (4, 12, 12), np.uint8)
ACTIONS = spaces.Discrete(5)
CUDA = pytest.param("none", "cuda", marks=pytest.mark.skipif(not th.cuda.is_available(), reason="there is no GPU"))


def filled(method: str, device: str, n: int = 150) -> GpuReplayBuffer:
    buffer = GpuReplayBuffer(200, IMAGES, ACTIONS, device, 2, compression_method=method, frame_stack=4, verify=True)
    for step in itertools.islice(play(IMAGES, 2, action_space=ACTIONS), n):
        buffer.add(*step)
    return buffer


def damage(buffer: GpuReplayBuffer) -> None:
    """Flip bits in what the device holds."""
    store: Any = buffer._stores[""]
    if buffer._config.recipe.method.name == "none":  # type: ignore[union-attr]
        store.values ^= 4
    else:
        store.frames.arena.data[:] ^= 4


# Kernels trust what is on the device: a record that is wrong would end a process on a GPU before anybody could look.
# In host memory it is decoded, and compared.
@pytest.mark.parametrize(("method", "device"), [("none", "cpu"), ("delta", "cpu"), ("rle", "cpu"), CUDA])
def test_damage_is_found_in_batches(method: str, device: str, tmp_path: Path) -> None:
    buffer = filled(method, device)
    buffer.sample(64)
    buffer.save(tmp_path / "buffer")
    copies = [buffer, pickle.loads(pickle.dumps(buffer)), GpuReplayBuffer.load(tmp_path / "buffer", device)]
    for each in copies:
        assert each.verify
        each.sample(64)
        damage(each)
        with pytest.raises(CorruptDataError):
            each.sample(64)


def test_tensors_of_the_device_are_stored_with_their_checksums(either_way: str, device: str) -> None:
    buffer = filled("delta", device, n=10)
    for step in itertools.islice(play(IMAGES, 2, action_space=ACTIONS, seed=1), 20):
        buffer.add(th.tensor(step.obs, device=device), th.tensor(step.next_obs, device=device), *step[2:])
    buffer.sample(6)
    assert all(column[:30].all() for column in buffer._stores[""].digests.columns)  # type: ignore[union-attr]
    buffer._stores[""].digests.columns[0][:] += 1  # type: ignore[union-attr]
    with pytest.raises(CorruptDataError):
        buffer.sample(6)


def test_rollouts() -> None:
    buffer = GpuRolloutBuffer(20, IMAGES, ACTIONS, "cpu", n_envs=2, compression_method="none", verify=True)
    for number in range(3):
        buffer.reset()
        for step in itertools.islice(play(IMAGES, 2, action_space=ACTIONS, seed=number), 20):
            buffer.add(step.obs, step.action, step.reward, step.done, th.zeros(2), th.zeros(2))
        list(buffer.get(7))
    buffer._stores[""].values ^= 1  # type: ignore[attr-defined]
    with pytest.raises(CorruptDataError):
        list(buffer.get(7))
