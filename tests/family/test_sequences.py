"""Buffers that sample sequences: what long histories do not show, such as errors, interruptions and normalization."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.envs import IdentityEnvBox
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_extra_buffers.codecs.registry import parse_method
from sb3_extra_buffers.compressed import CompressedPrioritizedSequenceReplayBuffer, CompressedSequenceReplayBuffer
from sb3_extra_buffers.errors import ConfigurationError, EmptyBufferError, SegmentError
from sb3_extra_buffers.storage.config import CodecRecipe
from sb3_extra_buffers.storage.frame_store import FrameStore
from tests.compressed.test_interrupted import interrupted

VECTORS = spaces.Box(-np.inf, np.inf, (2,), np.float32)
ACTIONS = spaces.Discrete(3)


def make(slots: int = 50, n_envs: int = 1, cls: Any = CompressedSequenceReplayBuffer, **options: Any) -> Any:
    return cls(slots * n_envs, VECTORS, ACTIONS, "cpu", n_envs, **{"length": 4, **options})


def add(buffer: Any, number: int, done: bool = False, n_envs: int = 1, **options: Any) -> None:
    """A step whose observation is its number."""
    now, following = (np.full((n_envs, 2), value, np.float32) for value in (number, number + 1))
    action, reward = np.full(n_envs, number % 3), np.full(n_envs, number, np.float32)
    buffer.add(now, following, action, reward, np.full(n_envs, done), [{}] * n_envs, **options)


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"length": 0}, "length must be at least 1, not 0"),
            ({"burn_in": -1}, "must not be negative, but are -1"),
            ({"overlap": 4}, "overlap must be from 0 to 3 .*, not 4"),
            ({"at_episode_end": "wrap"}, "'pad', 'stop' or 'cross', not 'wrap'"),
            ({"length": 51}, "room for 50 steps .* too short for a sequence of 51"),
            ({"latents": {"state": "big"}}, r"'state' must be declared by a shape, \(256,\).*'big'"),
            ({"latents": {"state": ((2,), object)}}, "'state' must be declared"),
            ({"latents": {"state": (-1,)}}, "'state' must be declared"),
            ({"latents": {"state": (2, 0)}}, "'state' must be declared"),
            ({"optimize_memory_usage": True}, "Leave it out"),
        ],
    )
    def test_that_cannot_work(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            make(**options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"eta": 2}, "eta must be from 0 to 1, not 2"), ({"online_queue": True}, "is not for prioritized buffers")],
    )
    def test_of_priorities_that_cannot_work(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            make(cls=CompressedPrioritizedSequenceReplayBuffer, **options)

    def test_latents_are_updated_together_or_not_at_all(self) -> None:
        buffer = make(latents={"first": (1,), "second": (1,)})
        for number in range(8):
            add(buffer, number)
        positions = buffer.sample(2).positions
        ones = np.ones((*positions.shape, 1))
        with pytest.raises(ValueError, match="could not convert"):
            buffer.update_latents(positions, {"first": ones, "second": np.full_like(ones, "many", dtype="U4")})
        assert not buffer.latent_first.any()

    def test_latents_may_be_of_any_float_type(self, tmp_path: Path) -> None:
        buffer = make(latents={"state": ((1,), ">f4")})
        for number in range(8):
            add(buffer, number, latents={"state": th.full((1, 1), 1.5, dtype=th.bfloat16)})
        assert (buffer.latent_state[:8] == 1.5).all()
        buffer.save(tmp_path / "buffer")
        assert (type(buffer).load(tmp_path / "buffer").latent_state[:8] == 1.5).all()

    def test_an_unknown_latent_is_named(self) -> None:
        buffer = make(latents={"state": (2,)})
        with pytest.raises(ConfigurationError, match=r"no latent 'stat'\. Its latents are: 'state'"):
            add(buffer, 0, latents={"stat": np.zeros((1, 2))})
        assert buffer.size() == 0
        with pytest.raises(ConfigurationError, match=r"must have the shape \(3, 2\), not \(3,\)"):
            buffer.update_latents(np.arange(3), {"state": np.zeros(3)})


def test_an_empty_buffer_says_what_is_missing() -> None:
    buffer = make(at_episode_end="stop")
    for number in range(3):
        add(buffer, number, done=True)
    with pytest.raises(EmptyBufferError, match=r"no sequence of 4 steps yet .* holds 3 steps .* at_episode_end='pad'"):
        buffer.sample(1)


def test_sequences_end_with_their_episode() -> None:
    buffer = make(burn_in=1, at_episode_end="pad")
    for number in range(3):
        add(buffer, number, done=number == 2)
    add(buffer, 10)  # belongs to no sequence yet
    assert buffer.n_sequences == 2  # the last step alone would be only burn-in
    batch = buffer.sample(40)
    starts = batch.rewards[:, 0].numpy()
    assert set(starts.tolist()) == {0, 1}
    for row, start in enumerate(starts.astype(int).tolist()):
        n = 3 - start
        assert batch.mask[row].tolist() == [True] * n + [False] * (5 - n)
        assert batch.terminals[row].tolist() == [False] * (n - 1) + [True] + [False] * (5 - n)
        assert batch.observations[row, :, 0].tolist() == [*range(start, 3), *[0] * (5 - n)]
        assert batch.is_first[row, 0] == (start == 0)


def test_a_gap_is_found_after_loading(tmp_path: Any) -> None:
    buffer = make(at_episode_end="cross")
    for number in range(6):
        add(buffer, number)
    buffer.save(tmp_path / "saved")
    for first, expected in ((6, 7), (50, 4)):  # the same episode goes on, or a new one begins
        loaded = CompressedSequenceReplayBuffer.load(tmp_path / "saved", device="cpu")
        for number in range(first, first + 4):
            add(loaded, number)
        assert loaded.n_sequences == expected
        assert loaded.episode_steps[6, 0] == (6 if first == 6 else 0)


def test_a_gap_is_found_between_observations_that_are_equal_in_a_batch_only() -> None:
    """Here, batches round float64 to float32."""
    space = spaces.Box(-1, 1, (1,), np.float64)
    buffer = CompressedSequenceReplayBuffer(20, space, ACTIONS, "cpu", length=2, output_dtype="float")
    for number in range(6):
        now, following = np.full((1, 1), number / 10), np.full((1, 1), (number + 1) / 10 + (number == 2) * 1e-12)
        buffer.add(now, following, np.zeros(1), np.zeros(1), np.zeros(1), [{}])
    assert buffer.episode_steps[:6, 0].tolist() == [0, 1, 2, 0, 1, 2]


def test_the_online_queue_hands_out_everything_once() -> None:
    buffer = make(online_queue=True, at_episode_end="cross")
    for number in range(14):
        add(buffer, number)
    batch = buffer.sample(5)
    assert batch.rewards[:3, 0].tolist() == [0, 4, 8]
    assert copy.deepcopy(buffer)._index.online.counts.sum() == 0
    for number in range(14, 16):
        add(buffer, number)
    assert buffer.sample(2).rewards[0].tolist() == [12, 13, 14, 15]


def test_batches_for_vec_normalize() -> None:
    env = VecNormalize(DummyVecEnv([lambda: IdentityEnvBox()]), norm_obs=True)
    buffer = CompressedSequenceReplayBuffer(50, env.observation_space, env.action_space, "cpu", length=3)
    env.obs_rms.mean, env.obs_rms.var = np.array([0.5]), np.array([4.0])
    for number in range(5):
        now, following = (np.full((1, 1), value / 10, np.float32) for value in (number, number + 1))
        buffer.add(now, following, np.zeros((1, 1)), np.array([number]), np.array([number == 4]), [{}])
    batch = buffer.sample(30, env)
    plain = buffer.sample(30)
    expected = env.normalize_obs(np.arange(5, dtype=np.float32)[:, None] / 10)
    numbers = (batch.positions).reshape(-1)
    shown = batch.observations.reshape(-1, 1).numpy()
    np.testing.assert_allclose(shown[numbers >= 0], expected[numbers[numbers >= 0]], rtol=1e-6)
    assert (shown[numbers < 0] == 0).all()
    assert plain.observations.max() <= 0.41


def test_sb3s_transitions_become_sequences() -> None:
    source = ReplayBuffer(20, VECTORS, ACTIONS, "cpu")
    for number in range(33):
        add(source, number, done=number % 11 == 10)
    buffer = CompressedSequenceReplayBuffer.from_sb3(source, "cpu", length=4, at_episode_end="stop")
    batch = buffer.sample(1000)
    assert set(batch.rewards[:, 0].tolist()) == {13, 14, 15, 16, 17, 18, *range(22, 30)}
    assert (batch.rewards.diff(dim=1) == 1).all()


@pytest.mark.parametrize("method", ["delta", "zstd3"])
def test_each_record_is_decoded_once_per_batch(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images = spaces.Box(0, 255, (4, 12, 12), np.uint8)
    buffer = CompressedSequenceReplayBuffer(60, images, ACTIONS, "cpu", length=8, compression_method=method)
    frames = np.random.default_rng(0).integers(0, 255, (70, 12, 12), np.uint8)
    for step in range(60):
        now, following = frames[step : step + 4][None], frames[step + 1 : step + 5][None]
        buffer.add(now, following, np.zeros(1), np.zeros(1), np.zeros(1, dtype=bool), [{}])
    decoded: list[tuple[int, int]] = []
    gather = FrameStore.gather

    def spy(store: FrameStore, lanes: Any, firsts: Any, outs: Any) -> None:
        assert outs[0].shape[1] == store.codec.frames_per_record  # whole records
        decoded.extend((lane, first) for row in firsts.tolist() for lane, first in zip(lanes, row, strict=True))
        gather(store, lanes, firsts, outs)

    monkeypatch.setattr(FrameStore, "gather", spy)
    batch = buffer.sample(16)  # 128 observations of 4 frames, among which are at most 64 frames
    assert batch.observations.shape[:2] == (16, 8)
    assert 0 < len(set(decoded)) == len(decoded) <= 64


@pytest.mark.parametrize("time_first", [False, True])
def test_sequences_of_frames_that_several_codecs_have_stored(time_first: bool) -> None:
    """Most are decoded where they belong, but not those with the end of an episode or a change of the codec in them."""
    n_slots, n_envs, rng = 200, 2, np.random.default_rng(0)
    images, options = spaces.Box(0, 255, (1, 24, 24), np.uint8), {"length": 12, "at_episode_end": "cross"}
    buffer = CompressedSequenceReplayBuffer(
        n_slots * n_envs, images, ACTIONS, "cpu", n_envs, time_first=time_first, frame_stack=1, **options
    )
    stored = np.zeros((n_slots, n_envs, *images.shape), np.uint8)
    now = rng.integers(0, 256, (n_envs, *images.shape), np.uint8)
    for step in range(700):
        if step % 67 == 66:
            buffer._stores[""].change_codec(CodecRecipe(parse_method(("delta", "zstd3", "none")[step % 3])))
        following, done = now.copy(), rng.random(n_envs) < 0.02
        following[:, 0, rng.integers(24)] += 1
        stored[buffer.pos] = now
        rewards = np.full(n_envs, buffer.pos) * n_envs + np.arange(n_envs)
        buffer.add(now, following, np.zeros(n_envs), rewards, done, [{}] * n_envs)
        now = np.where(done[:, None, None, None], rng.integers(0, 256, now.shape, np.uint8), following)
        if step > 12 and step % 5 == 0:
            batch = buffer.sample(8)
            places = batch.rewards.numpy().astype(int)
            np.testing.assert_array_equal(batch.observations, stored.reshape(-1, *images.shape)[places])


def test_segments_are_refused() -> None:
    with pytest.raises(SegmentError, match="CompressedSequenceReplayBuffer can neither export nor ingest segments"):
        make().export_segment()


def test_priorities_mix_the_largest_and_the_mean_error() -> None:
    buffer = make(cls=CompressedPrioritizedSequenceReplayBuffer, alpha=1.0, eta=0.75, epsilon=1e-9, latents={"h": (1,)})
    for number in range(10):
        add(buffer, number)
    batch = buffer.sample(1)
    mask = th.tensor([[True, True, True, False]])
    buffer.update_priorities(batch.sequences, th.tensor([[1.0, -3.0, 2.0, 9.0]]), mask)
    slot = int(batch.positions[0, 0])
    assert buffer._tree[np.array([slot])][0] == pytest.approx(0.75 * 3 + 0.25 * 2)
    for number in range(10, 70):
        add(buffer, number)
    buffer.update_priorities(batch.sequences, th.ones(1, 4))  # overwritten since
    with pytest.raises(ConfigurationError, match="NaN or infinite"):
        buffer.update_priorities(batch.sequences, th.full((1, 4), th.nan))
    with pytest.raises(ConfigurationError, match="one of them of length 1"):
        buffer.update_priorities(batch.sequences, th.ones(4))


def test_one_thread_may_add_while_another_samples() -> None:
    buffer = make(16, at_episode_end="stop", latents={"h": (1,)})
    for number in range(20):
        add(buffer, number)
    wrong, done = [], threading.Event()

    def sample() -> None:
        while not done.is_set():
            batch = buffer.sample(8)
            numbers = batch.rewards
            right = (batch.observations[..., 0] == numbers).all() and (numbers.diff(dim=1) == 1).all()
            wrong.extend([] if right else [numbers])
            buffer.update_latents(batch.positions, {"h": batch.rewards[..., None]})

    thread = threading.Thread(target=sample)
    thread.start()
    for number in range(20, 2000):
        add(buffer, number)
    done.set()
    thread.join()
    assert not wrong
    latents, numbers = buffer.latent_h[..., 0], buffer.rewards
    assert ((latents == 0) | (latents == numbers)).all()  # never those of a step that was overwritten


@pytest.mark.parametrize("n_before", [0, 14])
@pytest.mark.parametrize("at_episode_end", ["pad", "stop", "cross"])
def test_an_interrupted_step_is_stored_whole_or_not_at_all(at_episode_end: str, n_before: int) -> None:
    def filled(n_steps: int) -> Any:
        buffer = make(
            6, 2, cls=CompressedPrioritizedSequenceReplayBuffer, latents={"h": (1,)}, at_episode_end=at_episode_end
        )
        for number in range(n_steps):
            add(buffer, number, number % 5 == 4, 2, latents={"h": np.full((2, 1), number)})
        return buffer

    def contents(buffer: Any) -> list[Any]:
        index = buffer._index
        queues = [index.anchors.of_env(env).tolist() for env in range(2)]
        tree = buffer._tree[np.arange(12)].tolist()
        counters = [index.n_added, index._unbroken.tolist(), index._is_open.tolist()]
        return [buffer.pos, buffer.rewards.tolist(), buffer.episode_steps.tolist(), queues, tree, counters]

    before, after, was_stored = contents(filled(n_before)), contents(filled(n_before + 1)), []
    for line in range(1, 2000):
        buffer = filled(n_before)
        last = lambda buffer=buffer: add(  # noqa: E731
            buffer, n_before, n_before % 5 == 4, 2, latents={"h": np.full((2, 1), n_before)}
        )
        if not interrupted(last, line):
            break
        buffer.check()
        is_stored = buffer.pos == (n_before + 1) % 6
        was_stored.append(is_stored)
        assert contents(buffer) == (after if is_stored else before)
    assert sum(was_stored) > 5
    assert len(was_stored) - sum(was_stored) > 5
