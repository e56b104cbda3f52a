"""CompressedStorage in TorchRL's replay buffers, beside LazyTensorStorage: the same values after any history."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch as th

from sb3_extra_buffers.errors import ConfigurationError, MissingPackageError
from sb3_extra_buffers.storage.observation_tensor import ObservationTensor
from tests.neighbours.torchrl_buffers import SIZE, STACK, Game, assert_equal, both, filled, new_buffer, sampled

# Where TorchRL is missing, the import above skips these tests.
# isort: split
import torchrl.data as rl
from tensordict import TensorDict, lazy_stack, tensorclass
from torchrl.data.replay_buffers.samplers import (
    PrioritizedSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from torchrl.data.replay_buffers.writers import TensorDictMaxValueWriter

from sb3_extra_buffers.torchrl import CompressedStorage

pytestmark = pytest.mark.filterwarnings("default")  # TorchRL has warnings of its own
PAGE = Path(__file__).parents[2] / "docs/torchrl.md"

SAMPLERS = {
    "random": lambda: None,
    "without replacement": SamplerWithoutReplacement,
    "slices by episode": lambda: SliceSampler(slice_len=4, traj_key="episode", strict_length=False),
    "slices by done": lambda: SliceSampler(num_slices=4, end_key=("next", "done"), strict_length=False),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(
        num_slices=4, traj_key="episode", strict_length=False
    ),
}


@pytest.mark.parametrize("sampler", list(SAMPLERS))
@pytest.mark.parametrize("dtype", [th.uint8, th.float32], ids=str)
def test_long_histories(sampler: str, dtype: th.dtype) -> None:
    buffers = both(sampler=SAMPLERS[sampler])
    game, rng = Game(1, dtype), np.random.default_rng(1)
    for i in range(80):
        kind = rng.integers(12)
        if kind == 0:
            step = TensorDict(game.step(), [])
            for buffer in buffers:
                buffer.add(step.clone())
        elif kind == 1 and len(buffers[0]) > 20:
            rows = th.from_numpy(rng.permutation(len(buffers[0]))[:5])
            values = buffers[1][rows].clone().apply(lambda value: value.roll(1, 0))
            for buffer in buffers:
                buffer[rows] = values
        elif kind == 2 and i > 40:
            for buffer in buffers:
                buffer.empty()
        elif kind == 3 and len(buffers[0]) > 20:
            value = game.steps(3)["pixels"]
            for buffer in buffers:
                buffer.set_at_("pixels", value, th.tensor([3, 1, 12]))
        else:
            batch = game.steps(int(rng.integers(1, 30)))
            for buffer in buffers:
                buffer.extend(batch.clone())
        if len(buffers[0]) >= 30:
            sampled(buffers, i)
        if len(buffers[0]) and i % 10 == 0:
            assert_equal(buffers[0][:], buffers[1][:])
            assert_equal(buffers[0][len(buffers[0]) - 1], buffers[1][len(buffers[0]) - 1])
    storage = buffers[0].storage
    storage.check()
    assert {key for keys, _ in storage._compressed for key in keys} == {
        ("pixels",),
        ("next", "pixels"),
        ("camera", "depth"),
        ("next", "camera", "depth"),
    }
    assert len(storage._compressed) == 2  # an entry and its next one share a store


def test_priorities() -> None:
    try:
        PrioritizedSampler(10, 1.0, 1.0)
    except RuntimeError as error:
        pytest.skip(f"this build of TorchRL has no compiled part for torch {th.__version__}: {error}")
    buffers = both(sampler=lambda: PrioritizedSampler(100, 0.7, 0.5))
    game = Game(2)
    for i in range(40):
        batch = game.steps(11)
        for buffer in buffers:
            buffer.extend(batch.clone())
        sampled(buffers, i)
        for buffer in buffers:
            th.manual_seed(i)
            np.random.seed(i)
            found = buffer.sample()
            found["td_error"] = found["next", "reward"].abs()
            buffer.update_tensordict_priority(found)


def test_writing_the_best_to_any_place() -> None:
    buffers = both(50, writer=lambda: TensorDictMaxValueWriter(rank_key=("next", "reward")))
    game = Game(3)
    for i in range(60):
        batch = game.steps(9)
        for buffer in buffers:
            buffer.extend(batch.clone())
        sampled(buffers, i)
    assert_equal(buffers[0][:], buffers[1][:])
    buffers[0].storage.check()


@pytest.mark.parametrize("dim_extend", [0, 1])
def test_two_dimensions(dim_extend: int) -> None:
    buffers = both(120, ndim=2, dim_extend=dim_extend)
    games = [Game(seed) for seed in range(3)]
    for i in range(25):
        batch = th.stack([game.steps(7) for game in games], 1 - dim_extend)
        for buffer in buffers:
            buffer.extend(batch.clone())
        sampled(buffers, i)
        assert_equal(buffers[0][:], buffers[1][:])
    assert buffers[0].storage.shape == buffers[1].storage.shape
    assert len(buffers[0]) == len(buffers[1]) == 120
    # Each environment has frames of its own, so stacks share theirs.
    pixels = {keys[0]: columns.store for keys, columns in buffers[0].storage._compressed}[("pixels",)]
    assert pixels.n_envs == 3
    assert pixels.layout.stack == STACK


def test_environments_in_turn() -> None:
    """Rows of several environments, one step of each after the other, still share their frames."""
    n_frames = {}
    for n_envs in (1, 3):
        buffers = both(150, ours={"n_envs": n_envs})
        games = [Game(seed) for seed in range(3)]
        for i in range(60):
            batch = th.cat([game.steps(1) for game in games])
            for buffer in buffers:
                buffer.extend(batch.clone())
            sampled(buffers, i)
        stores = {keys[0]: columns.store for keys, columns in buffers[0].storage._compressed}
        n_frames[n_envs] = int((stores["pixels",].frames.heads).sum()) * stores["pixels",].layout.frame.nbytes
    assert n_frames[3] < n_frames[1] / 3


@tensorclass
class Step:
    pixels: th.Tensor
    reward: th.Tensor


def test_other_kinds_of_data() -> None:
    game = Game(4)
    steps = game.steps(40)
    pixels, reward = steps["pixels"], steps["next", "reward"]
    datas = [
        pixels,
        Step(pixels=pixels, reward=reward, batch_size=[40]),
        {"a": pixels, "b": [reward, (pixels[:, :2],)]},
    ]
    for data in datas:
        buffers = [
            rl.ReplayBuffer(storage=make(30), batch_size=8) for make in (CompressedStorage, rl.LazyTensorStorage)
        ]
        for buffer in buffers:
            buffer.extend(data)
        batches = []
        for buffer in buffers:
            th.manual_seed(0)
            batches.append(buffer.sample())
        found, expected = (th.utils._pytree.tree_leaves(batch) for batch in batches)
        assert type(batches[0]) is type(batches[1])
        assert len(found) == len(expected)
        assert all(type(leaf) is not ObservationTensor for leaf in found)
        for leaf, other in zip(found, expected, strict=True):
            assert th.equal(leaf, other)
        assert buffers[0].storage._compressed


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="append_transform"):
        CompressedStorage(10, device="cuda")
    with pytest.raises(ConfigurationError, match="n_envs"):
        CompressedStorage(10, ndim=2, n_envs=2)
    with pytest.raises(ConfigurationError, match="pixel"):
        rl.ReplayBuffer(storage=CompressedStorage(10, keys=["pixel"])).extend(Game().steps(2))
    stacked = lazy_stack([TensorDict(pixels=th.zeros(20, 20 + i, dtype=th.uint8)) for i in range(2)])
    with pytest.raises(ConfigurationError, match=r"pixels.*LazyStackedTensorDict"):
        rl.ReplayBuffer(storage=CompressedStorage(10, keys=["pixels"])).add(stacked)
    assert rl.ReplayBuffer(storage=CompressedStorage(10)).add(stacked) == 0
    ours, _, _ = filled()
    ours.dumps(tmp_path / "buffer")
    with pytest.raises(ConfigurationError, match="max_size=100"):
        new_buffer(60).loads(tmp_path / "buffer")


def test_only_chosen_entries() -> None:
    buffers = both(ours={"keys": ["pixels", ("next", "pixels")], "compression_method": "zstd-3", "verify": True})
    batch = Game().steps(60)
    for buffer in buffers:
        buffer.extend(batch.clone())
    sampled(buffers, 0)
    assert [keys for keys, _ in buffers[0].storage._compressed] == [[("pixels",), ("next", "pixels")]]
    assert buffers[0].storage.memory_usage().method == "pixels: zstd-3"


def test_slices_decode_nothing_until_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """``SliceSampler`` reads ``storage[:]`` for every batch, for the ends of episodes."""
    ours, _, _ = filled()
    decoded = []
    for _, columns in ours.storage._compressed:
        read = columns.read
        monkeypatch.setattr(
            columns, "read", lambda n, rows, read=read: (decoded.append(rows.numel()), read(n, rows))[1]
        )
    assert ours.storage[:]["next", "done"].shape == (100, 1)
    assert ours[:]["pixels"].shape == (100, STACK, SIZE, SIZE)
    assert not decoded
    ours.sample()
    assert decoded == [16, 16]  # each store once
    sampler = SliceSampler(slice_len=4, traj_key="episode", strict_length=False)
    sampler.sample(ours.storage, 16)
    assert max(decoded) == 16  # it reads the rows of its slices, and no others


def test_the_page_of_the_documentation_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "times smaller" in done.stdout


def test_memory() -> None:
    buffer = new_buffer(3000)
    game = Game(6)
    for _ in range(30):
        buffer.extend(game.steps(100))
    usage = buffer.storage.memory_usage()
    assert usage.transitions == 3000
    assert usage.raw_equivalent > 3000 * 2 * (STACK + 4) * SIZE * SIZE
    assert usage.ratio > 8


def test_a_missing_package_is_named() -> None:
    error = MissingPackageError("CompressedStorage", "torchrl", "torchrl")
    assert re.search(r"sb3-extra-buffers\[torchrl\]", str(error))
