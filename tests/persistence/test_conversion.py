"""To SB3's buffers, Minari's datasets and arrays, and back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.save_util import save_to_pkl

from sb3_extra_buffers.compressed import (
    CompressedDictReplayBuffer,
    CompressedHerReplayBuffer,
    CompressedReplayBuffer,
    CompressedSequenceReplayBuffer,
)
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer
from tests.persistence.buffers import ACTIONS, DICT, IMAGES, N_ENVS, SLOTS, goal_env, make, steps_for
from tests.transitions import add_to_replay, assert_same, sample_both

OPTIMIZED = {"optimize_memory_usage": True, "handle_timeout_termination": False}
PAIRS = [
    (ReplayBuffer, CompressedReplayBuffer, IMAGES, {}),
    (ReplayBuffer, CompressedReplayBuffer, IMAGES, OPTIMIZED),
    (DictReplayBuffer, CompressedDictReplayBuffer, DICT, {}),
    (ReplayBuffer, GpuReplayBuffer, IMAGES, {}),
]
COUNTS = [0, 25, SLOTS, 2 * SLOTS + 11]
OPTIONS: list[dict[str, Any]] = [{}, {"normalize_images": True}, {"output_dtype": "float"}, {"dtypes": "float64"}]
"""Options with which batches, or stored observations, have another dtype than the space, and other values."""


def filled(cls: Any, space: spaces.Space, count: int, **kwargs: Any) -> Any:
    buffer = cls(SLOTS * N_ENVS, space, ACTIONS, device="cpu", n_envs=N_ENVS, **kwargs)
    for step in steps_for(buffer, count):
        add_to_replay([buffer], step)
    return buffer


def check_same(plain: ReplayBuffer, ours: CompressedReplayBuffer) -> None:
    """Now, and when more is added."""
    assert (plain.pos, plain.full) == (ours.pos, ours.full)
    for step in [None, *steps_for(plain, 10)]:
        if step is not None:
            add_to_replay([plain, ours], step)
        if plain.size() > 1:
            sample_both(plain, ours, 40, seed=1)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("plain_class", "our_class", "space", "arguments"), PAIRS)
def test_from_sb3(plain_class: Any, our_class: Any, space: Any, arguments: Any, count: int, tmp_path: Path) -> None:
    plain = filled(plain_class, space, count, **arguments)
    save_to_pkl(tmp_path / "buffer", plain)
    for source in (plain, tmp_path / "buffer"):
        ours = our_class.from_sb3(source, "cpu", compression_method="delta")
        assert type(ours) is our_class
    check_same(plain, ours)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("plain_class", "our_class", "space", "arguments"), PAIRS)
def test_to_sb3(plain_class: Any, our_class: Any, space: Any, arguments: Any, count: int, options: Any) -> None:
    """The buffer is the one that SB3 would have filled, whatever ours does to the observations of its batches."""
    plain = filled(our_class, space, count, **arguments, **options).to_sb3()
    assert type(plain) is plain_class
    check_same(plain, filled(our_class, space, count, **arguments))


@pytest.mark.parametrize("cls", [CompressedReplayBuffer, CompressedSequenceReplayBuffer])
@pytest.mark.parametrize("count", COUNTS)
def test_from_sb3_without_the_transition_that_has_lost_its_observation(cls: Any, count: int) -> None:
    """In a full buffer with optimize_memory_usage, the newest next observation is in the place of the oldest one."""
    options = {"length": 2} if cls is CompressedSequenceReplayBuffer else {}
    source = filled(ReplayBuffer, IMAGES, count, **OPTIMIZED)
    ours = cls.from_sb3(source, "cpu", optimize_memory_usage=False, **options)
    kept = steps_for(ours, count)[-SLOTS + source.full :]
    assert ours.size() == len(kept)
    for slot, step in enumerate(kept):
        assert_same(ours.observations[slot], step.obs)
        assert_same(ours.rewards[slot], step.reward)
    ours.check()


@pytest.mark.parametrize("count", COUNTS)
def test_from_sb3_to_her(count: int) -> None:
    """HER's fourth argument is an environment, and its episodes begin where the oldest transition is."""
    env = goal_env()
    source = filled(DictReplayBuffer, env.observation_space, count)
    ours = CompressedHerReplayBuffer.from_sb3(source, "cpu")
    ours.set_env(env)
    assert (ours.device.type, ours.pos, ours.full) == ("cpu", source.pos, source.full)
    oldest = source.pos if source.full else 0
    for env_index in range(N_ENVS):
        ends = np.flatnonzero(np.roll(source.dones[:, env_index], -oldest)) + 1
        lengths = np.diff(ends, prepend=0)
        expected = np.zeros(SLOTS, dtype=np.int64)
        expected[: lengths.sum()] = np.repeat(lengths, lengths)
        np.testing.assert_array_equal(np.roll(ours.ep_length[:, env_index], -oldest), expected)
    if count:
        assert len(ours.sample(10).rewards) == 10


def test_from_sb3_into_a_folder_that_holds_a_buffer(tmp_path: Path) -> None:
    source = filled(ReplayBuffer, IMAGES, 5)
    options = {"storage": "mmap", "path": tmp_path / "buffer"}
    CompressedReplayBuffer.from_sb3(source, "cpu", **options).close()
    with pytest.raises(ConfigurationError, match="holds a buffer already"):
        CompressedReplayBuffer.from_sb3(source, "cpu", **options)
    with CompressedReplayBuffer.load(tmp_path / "buffer", "cpu") as ours:
        check_same(source, ours)


def test_from_a_compressed_buffer() -> None:
    source = filled(CompressedReplayBuffer, IMAGES, 25, normalize_images=True)
    check_same(CompressedReplayBuffer.from_sb3(source, "cpu"), filled(CompressedReplayBuffer, IMAGES, 25))


def test_what_cannot_be_converted() -> None:
    her = make("CompressedHerReplayBuffer")
    with pytest.raises(ConfigurationError, match="CompressedHerReplayBuffer cannot be converted"):
        CompressedDictReplayBuffer.from_sb3(her)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("count", [1, 25, 2 * SLOTS + 11])
@pytest.mark.parametrize(("plain_class", "our_class", "space", "arguments"), PAIRS)
def test_to_numpy(plain_class: Any, our_class: Any, space: Any, arguments: Any, count: int, options: Any) -> None:
    ours = filled(our_class, space, count, **arguments, **options)
    steps = steps_for(ours, count)[-SLOTS:]
    if arguments and ours.full:
        steps = steps[1:]  # the oldest one has no observation any more
    chunks = list(ours.to_numpy(chunk_size=7))
    assert all(len(chunk["rewards"]) <= 7 for chunk in chunks)
    names = (("observations", 0), ("next_observations", 1), ("rewards", 3))
    for name, position in names if not arguments else names[::2]:
        expected = [step[position] for step in steps]
        if isinstance(expected[0], dict):
            for key in expected[0]:
                found = np.concatenate([chunk[name][key] for chunk in chunks])
                assert_same(found, np.stack([part[key] for part in expected]))
        else:
            assert_same(np.concatenate([chunk[name] for chunk in chunks]), np.stack(expected))


@pytest.fixture
def minari(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    if sys.version_info < (3, 11):
        pytest.skip("Minari needs Python 3.11")
    """The package, with a folder of its own for datasets."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return pytest.importorskip("minari")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("cls", "space", "actions"),
    [
        (CompressedReplayBuffer, IMAGES, ACTIONS),
        (CompressedReplayBuffer, spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-1, 1, (2,), np.float32)),
        (CompressedReplayBuffer, spaces.Discrete(4), spaces.MultiDiscrete([2, 3])),
        (CompressedDictReplayBuffer, spaces.Dict({"image": IMAGES, "vector": DICT["a/vector~"]}), ACTIONS),
    ],
)
def test_minari(cls: Any, space: Any, actions: Any, options: Any, minari: Any) -> None:
    """What Minari reads back has every step, in episodes that end where those of the environments ended."""
    buffer = cls(SLOTS * N_ENVS, space, actions, device="cpu", n_envs=N_ENVS, **options)
    steps = steps_for(buffer, SLOTS + 7)
    for step in steps:
        add_to_replay([buffer], step)
    buffer.to_minari("test/buffer-v0")
    dataset = minari.load_dataset("test/buffer-v0")
    assert dataset.observation_space == space
    assert dataset.action_space == actions
    assert dataset.total_steps == SLOTS * N_ENVS
    episodes = list(dataset.iterate_episodes())
    kept = steps[-SLOTS:]
    seen = iter(episodes)
    for env in range(N_ENVS):
        position = 0
        while position < SLOTS:
            episode = next(seen)
            length = len(episode.rewards)
            part = kept[position : position + length]
            assert_equal(episode.observations, [step.obs for step in part], env, length)
            assert_equal(episode.observations, [step.next_obs for step in part], env, length, shift=1)
            np.testing.assert_array_equal(episode.rewards, [step.reward[env] for step in part])
            np.testing.assert_array_equal(np.asarray(episode.actions), [step.action[env] for step in part])
            truncated = [step.infos[env].get("TimeLimit.truncated", False) for step in part]
            terminated = [bool(step.done[env]) and not cut for step, cut in zip(part, truncated, strict=True)]
            np.testing.assert_array_equal(episode.terminations, terminated)
            unfinished = not part[-1].done[env]
            np.testing.assert_array_equal(episode.truncations, [*truncated[:-1], truncated[-1] or unfinished])
            assert not any(step.done[env] for step in part[:-1])
            position += length
            if unfinished and position < SLOTS:
                assert str(of_env(kept[position].obs, env)) != str(of_env(part[-1].next_obs, env))
    assert next(seen, None) is None

    again = cls.from_minari("test/buffer-v0", "cpu")
    assert again.size() == SLOTS * N_ENVS
    np.testing.assert_array_equal(again.rewards[:, 0], buffer.rewards[(np.arange(SLOTS) + 7) % SLOTS].T.reshape(-1))
    again.to_minari("test/again-v0")
    for one, other in zip(minari.load_dataset("test/again-v0").iterate_episodes(), episodes, strict=True):
        for name in ("observations", "actions", "rewards", "terminations", "truncations"):
            assert_same(getattr(one, name), getattr(other, name))


@pytest.mark.filterwarnings("ignore")
def test_minari_to_her(minari: Any) -> None:
    env = goal_env()
    filled(CompressedDictReplayBuffer, env.observation_space, 25).to_minari("test/goals-v0")
    ours = CompressedHerReplayBuffer.from_minari("test/goals-v0", "cpu", env=env)
    assert ours.env is env
    assert CompressedHerReplayBuffer.from_minari("test/goals-v0", "cpu").env is None
    assert len(ours.sample(10).rewards) == 10


@pytest.mark.filterwarnings("ignore")
def test_an_episode_ends_where_a_segment_does_not_continue_it(minari: Any) -> None:
    """Even if the observations on both sides are the same."""
    space = spaces.Box(0, 1, (2,), np.float32)
    ours, sender = (CompressedReplayBuffer(20, space, ACTIONS, "cpu") for _ in range(2))
    zeros = np.zeros((1, 2), np.float32)
    for buffer in (ours, sender):
        for _ in range(3):
            buffer.add(zeros, zeros, np.zeros(1), np.zeros(1), np.zeros(1), [{}])
    ours.ingest_segment(sender.export_segment())
    episodes = ours.to_minari("test/segments-v0").iterate_episodes()
    assert [episode.truncations.tolist() for episode in episodes] == [[False, False, True]] * 2


def dataset_of(minari: Any, name: str, n_episodes: int, seed: int = 0, space: Any = IMAGES) -> Any:
    """Episodes of 40 steps, made of noise."""
    from minari.data_collector import EpisodeBuffer

    def episode(number: int) -> EpisodeBuffer:
        rng = np.random.default_rng((seed, number))
        noise = rng.integers(0, 256, space.shape, dtype=np.uint8)
        return EpisodeBuffer(
            observations=noise ^ np.arange(41, dtype=np.uint8).reshape(-1, *[1] * noise.ndim),
            actions=rng.integers(0, ACTIONS.n, 40),
            rewards=rng.normal(size=40).astype(np.float32),
            terminations=np.arange(40) == 39,
            truncations=np.zeros(40, dtype=bool),
        )

    return minari.create_dataset_from_buffers(
        name,
        (episode(number) for number in range(n_episodes)),
        observation_space=space,
        action_space=ACTIONS,
        jpeg_encoding=False,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [*OPTIONS, {"dtypes": "int8"}], ids=str)  # int8 loses values above 127
def test_minari_into_a_buffer_on_disk(options: dict[str, Any], minari: Any, tmp_path: Path) -> None:
    """An import that was killed goes on where it stopped, and one that is complete is only reopened."""
    dataset = dataset_of(minari, "test/noise-v0", 5)
    expected = CompressedReplayBuffer.from_minari(dataset, "cpu", **options)
    plain = CompressedReplayBuffer.from_minari(dataset, "cpu")
    options = {**options, "storage": "mmap", "path": tmp_path / "buffer"}
    half = CompressedReplayBuffer(200, IMAGES, ACTIONS, "cpu", **options)
    for slot in range(90):
        obs, next_obs = plain.observations[slot], plain.next_observations[slot]
        half.add(obs, next_obs, plain.actions[slot], plain.rewards[slot], plain.dones[slot], [{}])
    half.close()
    for _ in range(2):
        with CompressedReplayBuffer.from_minari(dataset, "cpu", **options) as buffer:
            assert buffer.size() == 200
            assert buffer.full
            for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
                assert_same(np.asarray(getattr(buffer, name)), np.asarray(getattr(expected, name)))
    with pytest.raises(ConfigurationError, match="other data"):
        CompressedReplayBuffer.from_minari(dataset_of(minari, "test/other-v0", 5, seed=1), "cpu", **options)
    with pytest.raises(ConfigurationError, match="other data"):  # of which there is less than the folder holds
        CompressedReplayBuffer.from_minari(dataset_of(minari, "test/shorter-v0", 2, seed=1), "cpu", 200, **options)
    with pytest.raises(ConfigurationError, match="smaller than the dataset"):
        CompressedReplayBuffer.from_minari(dataset_of(minari, "test/longer-v0", 6), "cpu", 200, **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_a_dataset_of_minari_need_not_fit_into_memory(minari: Any, tmp_path: Path) -> None:
    images = spaces.Box(0, 255, (3, 64, 64), np.uint8)
    names = {"test/small-v0": 2, "test/large-v0": 180}
    for name, n_episodes in names.items():
        dataset_of(minari, name, n_episodes, space=images)
    command = [sys.executable, "-W", "ignore", "-m", "tests.persistence.minari_probe", *names, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["data"] > 85e6
    assert found["anonymous"] < 40e6


def of_env(observation: Any, env: int) -> Any:
    return {key: part[env] for key, part in observation.items()} if isinstance(observation, dict) else observation[env]


def assert_equal(found: Any, expected: list[Any], env: int, length: int, shift: int = 0) -> None:
    if isinstance(found, dict):
        for key, array in found.items():
            assert_equal(array, [part[key] for part in expected], env, length, shift)
    else:
        assert len(found) == length + 1
        np.testing.assert_array_equal(found[shift : length + shift], [part[env] for part in expected])


@pytest.mark.skipif(sys.version_info >= (3, 11), reason="for Python 3.10")
def test_minari_is_refused_where_it_would_lose_something() -> None:
    with pytest.raises(ConfigurationError, match=r"need Python 3\.11"):
        CompressedReplayBuffer.from_minari("test/buffer-v0", "cpu")
