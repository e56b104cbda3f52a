"""Whatever SB3's buffer returns under a seed, a buffer on a device returns too, on the same device."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer
from tests.compressed.pairs import check_rollout
from tests.environments import SpaceEnv
from tests.gpu.helpers import (
    IMAGES,
    METHODS,
    SLOTS,
    SPACES,
    check_replay,
    recorded,
    replay_pair,
    rollout_pair,
)
from tests.transitions import Stacked, add_to_replay, assert_same, copied, play, sample_both


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("space", SPACES)
class TestEveryMethodAndSpace:
    def test_replay(self, method: str, space: str, device: str) -> None:
        check_replay(replay_pair(SPACES[space], device, 3, compression_method=method), recorded(space, 3))

    def test_rollout(self, method: str, space: str, device: str) -> None:
        buffers = rollout_pair(SPACES[space], device, 3, compression_method=method)
        for first in (0, SLOTS):
            check_rollout(buffers, recorded(space, 3)[first : first + SLOTS])


@pytest.mark.parametrize("method", METHODS)
def test_replay_that_saves_next_observations(method: str, device: str) -> None:
    options = {"optimize_memory_usage": True, "handle_timeout_termination": False}
    check_replay(replay_pair(IMAGES, device, compression_method=method, **options), recorded("channels first", 2))


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_buffers_of_a_few_slots(method: str, slots: int, device: str) -> None:
    transitions = recorded("channels first", 3)[:50]
    check_replay(replay_pair(IMAGES, device, 3, slots, compression_method=method), transitions, range(1, 50, 7))
    buffers = rollout_pair(IMAGES, device, 3, slots, compression_method=method)
    for first in range(0, 12, slots):
        check_rollout(buffers, transitions[first : first + slots])


@pytest.mark.parametrize("dtype", [np.uint16, np.float32, np.float64])
def test_a_batch_of_one(dtype: Any, device: str) -> None:
    space = spaces.Box(0, 100, (70,), dtype)
    buffers = replay_pair(space, device, compression_method="delta", frame_stack=None)
    values = np.zeros((2, 70), dtype)
    for step in range(60):
        values[:, step] = step
        for buffer in buffers:
            buffer.add(values.copy(), values.copy(), np.zeros((2, 1)), np.zeros(2), np.zeros(2), [{}, {}])
        sample_both(*buffers, batch_size=1, seed=step)


@pytest.mark.parametrize("frames_per_record", [1, 2, 3, 16])
def test_chains_of_frames(frames_per_record: int, device: str) -> None:
    options = {"compression_method": "delta", "compression_kwargs": {"frames_per_record": frames_per_record}}
    check_replay(replay_pair(IMAGES, device, **options), recorded("channels first", 2), range(1, 110, 9))


@pytest.mark.parametrize("frame_stack", [None, 1, 2, 4])
@pytest.mark.parametrize(("shape", "axis"), [((4, 6, 7), 0), ((6, 7, 4), -1)])
@pytest.mark.parametrize("method", ["rle", "delta"])
def test_declared_stacks(method: str, shape: Any, axis: int, frame_stack: int | None, device: str) -> None:
    space = spaces.Box(0, 255, shape, np.uint8)
    transitions = itertools.islice(play(space, 2, make_observer=functools.partial(Stacked, axis=axis)), 60)
    check_replay(
        replay_pair(space, device, compression_method=method, frame_stack=frame_stack), transitions, (20, 40, 60)
    )


@pytest.mark.parametrize(
    "action_space",
    [spaces.Box(-1, 1, (2,), np.float32), spaces.Box(-1, 1, (2, 2), np.float64), spaces.MultiBinary(3)],
    ids=str,
)
def test_every_action_space(action_space: spaces.Space, device: str) -> None:
    transitions = list(itertools.islice(play(IMAGES, 2, action_space=action_space), 60))
    check_replay(replay_pair(IMAGES, device, action_space=action_space), transitions, (30, 60))
    check_rollout(rollout_pair(IMAGES, device, action_space=action_space), transitions[:SLOTS])


@pytest.mark.parametrize(
    ("space", "keys"),
    [(SPACES["float32"], None), (IMAGES, None), (SPACES["Dict"], ["float32", "channels last"])],
    ids=["vector", "image", "Dict"],
)
@pytest.mark.parametrize("customized", [False, True])
def test_vec_normalize(space: spaces.Space, keys: list[str] | None, customized: bool, device: str) -> None:
    class Customized(VecNormalize):
        def normalize_obs(self, obs: Any) -> Any:
            return super().normalize_obs(obs)

    transitions = list(itertools.islice(play(space, 2), 60))
    env = (Customized if customized else VecNormalize)(DummyVecEnv([lambda: SpaceEnv(space)]), norm_obs_keys=keys)
    for transition in transitions[:10]:
        env._update_reward(np.ones(1))
        for key in keys or [None]:
            statistics = env.obs_rms if key is None else env.obs_rms[key]
            statistics.update(transition.obs if key is None else transition.obs[key])
    buffers = replay_pair(space, device)
    for transition in transitions:
        add_to_replay(buffers, transition)
    for seed, env.norm_obs in enumerate((True, False)):
        sample_both(*buffers, batch_size=50, seed=seed, env=env)


@pytest.mark.parametrize("method", METHODS)
class TestOutputs:
    def filled(self, device: str, **options: Any) -> list[Any]:
        buffers = replay_pair(IMAGES, device, **options)
        for transition in recorded("channels first", 2)[:60]:
            add_to_replay(buffers, transition)
        return buffers

    def test_floats(self, method: str, device: str) -> None:
        plain, ours = self.filled(device, compression_method=method, output_dtype="float")
        np.random.seed(0)
        expected = plain.sample(20)
        np.random.seed(0)
        found = ours.sample(20)
        assert found.observations.dtype == th.float32
        assert th.equal(found.observations, expected.observations.float())

    def test_normalized_images(self, method: str, device: str) -> None:
        plain, ours = self.filled(device, compression_method=method, normalize_images=True)
        np.random.seed(0)
        expected = plain.sample(20)
        np.random.seed(0)
        assert th.equal(ours.sample(20).next_observations, expected.next_observations.float() / 255)

    def test_observations_by_index(self, method: str, device: str) -> None:
        plain, ours = self.filled(device, compression_method=method)
        assert_same(ours.observations[3], plain.observations[3])
        slots, envs = np.array([0, 5, 35]), np.array([1, 0, 1])
        assert_same(ours.next_observations[slots, envs], plain.next_observations[slots, envs])

    def test_fields_that_are_written_from_outside(self, method: str, device: str) -> None:
        buffers = self.filled(device, compression_method=method)
        sample_both(*buffers, batch_size=30, seed=0)
        for buffer in buffers:
            buffer.dones[buffer.pos - 1] = True
            buffer.rewards[3, 1] = 7
            buffer.rewards[:] += 1
        sample_both(*buffers, batch_size=60, seed=1)
        for buffer in buffers:
            buffer.rewards *= 2
            np.add.at(buffer.rewards, (4, 0), 5)
        sample_both(*buffers, batch_size=60, seed=2)
        for buffer in buffers:
            buffer.dones.fill(1)
        sample_both(*buffers, batch_size=60, seed=3)

    def test_saved_and_loaded(self, method: str, device: str) -> None:
        plain, ours = self.filled(device, compression_method=method)
        again = pickle.loads(pickle.dumps(ours))
        for step, transition in enumerate(recorded("channels first", 2)[60:]):
            if step % 10 == 0:
                sample_both(plain, again, batch_size=30, seed=step)
            add_to_replay([plain, again], transition)
        sample_both(plain, copy.deepcopy(again), batch_size=30, seed=9)

    def test_reset(self, method: str, device: str) -> None:
        buffers = self.filled(device, compression_method=method)
        for buffer in buffers:
            buffer.reset()
        check_replay(buffers, recorded("channels first", 2)[:20], (5, 20))


@pytest.mark.parametrize("method", METHODS)
def test_tensors_as_observations(method: str, device: str) -> None:
    plain, ours = replay_pair(IMAGES, device, compression_method=method)
    for transition in recorded("channels first", 2):
        plain.add(*copied(transition))
        obs, next_obs, *rest = copied(transition)
        ours.add(th.tensor(obs, device=device), th.tensor(next_obs, device=device), *rest)
    sample_both(plain, ours, batch_size=60, seed=0)


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
class TestThroughTheKernels:
    @pytest.mark.parametrize("space", ["channels first", "channels last", "odd size", "float32", "uint16", "Dict"])
    @pytest.mark.parametrize("method", ["none", "rle", "delta"])
    def test_replay(self, method: str, space: str, device: str) -> None:
        buffers = replay_pair(SPACES[space], device, slots=9, compression_method=method)
        check_replay(buffers, recorded(space, 2)[:20], (20,), batch_size=3)

    @pytest.mark.parametrize("method", ["rle", "delta"])
    def test_rollout(self, method: str, device: str) -> None:
        buffers = rollout_pair(IMAGES, device, slots=6, compression_method=method, frame_stack=4)
        for first in (0, 6, 12):
            check_rollout(buffers, recorded("channels first", 2)[first : first + 6])

    @pytest.mark.parametrize("method", ["rle", "delta"])
    @pytest.mark.parametrize(("shape", "axis"), [((4, 6, 7), 0), ((6, 7, 4), -1)])
    def test_declared_stacks(self, method: str, shape: Any, axis: int, device: str) -> None:
        space = spaces.Box(0, 255, shape, np.uint8)
        transitions = itertools.islice(play(space, 2, make_observer=functools.partial(Stacked, axis=axis)), 20)
        buffers = replay_pair(space, device, slots=12, compression_method=method, frame_stack=4)
        check_replay(buffers, transitions, (20,), batch_size=5)

    def test_images_whose_memory_has_channels_last(self, device: str) -> None:
        """As SB3's wrappers hand them over."""
        plain, ours = replay_pair(IMAGES, device, slots=12, compression_method="delta", frame_stack=4)
        for transition in recorded("channels first", 2)[:30]:
            obs, next_obs, *rest = copied(transition)
            for buffer in (plain, ours):
                moved = [np.moveaxis(np.ascontiguousarray(np.moveaxis(part, 1, -1)), -1, 1) for part in (obs, next_obs)]
                buffer.add(*moved, *rest)
        sample_both(plain, ours, batch_size=12, seed=0)

    @pytest.mark.parametrize("method", ["none", "delta"])
    @pytest.mark.parametrize("options", [{"output_dtype": "float"}, {"normalize_images": True}], ids=str)
    def test_outputs(self, method: str, options: Any, device: str) -> None:
        plain, ours = replay_pair(IMAGES, device, slots=12, compression_method=method, frame_stack=4, **options)
        for transition in recorded("channels first", 2)[:20]:
            add_to_replay([plain, ours], transition)
        np.random.seed(0)
        expected = plain.sample(8).next_observations.float() / (255 if "normalize_images" in options else 1)
        np.random.seed(0)
        assert th.equal(ours.sample(8).next_observations, expected)

    @pytest.mark.parametrize("method", ["rle", "delta"])
    def test_saved_and_loaded(self, method: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also by a machine without Triton, whose files are loaded in turn."""
        plain, ours = replay_pair(IMAGES, device, slots=12, compression_method=method, frame_stack=4)
        for step, transition in enumerate(recorded("channels first", 2)[:48]):
            add_to_replay([plain, ours], transition)
            if step % 8 == 7:
                if device == "cpu":
                    monkeypatch.setenv("TRITON_INTERPRET", "01"[step // 8 % 2])
                ours.save(tmp_path / "buffer")
                ours = pickle.loads(pickle.dumps(GpuReplayBuffer.load(tmp_path / "buffer", device)))
                sample_both(plain, ours, batch_size=8, seed=step)
                ours.check()

    def test_moved_to_host_memory_and_back(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        plain, ours = replay_pair(IMAGES, device, slots=12, compression_method="delta", frame_stack=4)
        store = ours._stores[""]
        for step, transition in enumerate(recorded("channels first", 2)[:40]):
            add_to_replay([plain, ours], transition)
            if step % 8 == 7 and device == "cpu":
                monkeypatch.setenv("TRITON_INTERPRET", "01"[step // 8 % 2])
                store.to(store.device)
                ours._fields.to(store.device)
                assert (store.device_frames is None) == (step // 8 % 2 == 0)
                sample_both(plain, ours, batch_size=8, seed=step)
                ours.check()


def test_a_model_on_another_device_than_the_buffer() -> None:
    other = "cuda" if th.cuda.is_available() else "meta"
    plain, ours = replay_pair(IMAGES, other, buffer_device="cpu") if other == "cuda" else (None, None)
    if plain is None:
        ours = GpuReplayBuffer(72, IMAGES, spaces.Discrete(5), "cpu", 2, buffer_device="cpu")
        for transition in recorded("channels first", 2)[:60]:
            ours.add(*copied(transition))
        ours.device = th.device("meta")  # which tells where tensors go, though nothing of what is in them
        assert {tensor.device.type for tensor in ours.sample(5) if tensor is not None} == {"meta"}
        assert ours.buffer_device == th.device("cpu")
    else:
        check_replay([plain, ours], recorded("channels first", 2))


@pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", METHODS)
class TestMoving:
    def test_there_and_back(self, method: str) -> None:
        plain, ours = replay_pair(IMAGES, "cpu", compression_method=method)
        for step, transition in enumerate(recorded("channels first", 2)):
            add_to_replay([plain, ours], transition)
            if step % 20 == 19:
                ours.to("cuda" if step % 40 == 19 else "cpu")
                plain.device = ours.device
                sample_both(plain, ours, batch_size=30, seed=step)

    def test_saved_here_and_loaded_there(self, method: str) -> None:
        plain, ours = replay_pair(IMAGES, "cuda", compression_method=method)
        for transition in recorded("channels first", 2):
            add_to_replay([plain, ours], transition)
        again = pickle.loads(pickle.dumps(ours))
        again.device = plain.device = th.device("cpu")  # as SB3 does it
        sample_both(plain, again, batch_size=30, seed=0)

    def test_a_file_from_there_and_one_from_here(self, method: str, tmp_path: Path) -> None:
        plain, ours = replay_pair(IMAGES, "cuda", compression_method=method)
        for step, transition in enumerate(recorded("channels first", 2)):
            if step % 40 == 25:
                ours.save(tmp_path / "buffer")
                plain.device = th.device("cpu" if plain.device.type == "cuda" else "cuda")
                ours = GpuReplayBuffer.load(tmp_path / "buffer", device=plain.device)
                sample_both(plain, ours, batch_size=30, seed=step)
            add_to_replay([plain, ours], transition)
        sample_both(plain, ours, batch_size=30, seed=0)

    @pytest.mark.parametrize("space", ["channels first", "Dict"])
    @pytest.mark.parametrize("saves", [False, True])
    def test_nothing_waits_for_the_device(self, method: str, space: str, saves: bool) -> None:
        if method == "zstd":
            pytest.skip("in host memory")
        options = {"optimize_memory_usage": True, "handle_timeout_termination": False} if saves else {}
        if saves and space == "Dict":
            pytest.skip("not in SB3")
        plain, ours = replay_pair(SPACES[space], "cuda", compression_method=method, **options)
        transitions = recorded(space, 2)
        for transition in transitions:
            add_to_replay([plain, ours], transition)
        ours.sample(8)  # compiles
        with waiting_is_an_error():
            for transition in transitions:
                ours.add(*transition)
                ours.sample(8)

    def test_batches_of_a_rollout_wait_for_nothing(self, method: str) -> None:
        if method == "zstd":
            pytest.skip("in host memory")
        plain, ours = rollout_pair(IMAGES, "cuda", compression_method=method)
        check_rollout([plain, ours], recorded("channels first", 2)[:SLOTS])  # compiles
        with waiting_is_an_error():
            for _ in ours.get(8):
                pass


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    th.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        th.cuda.set_sync_debug_mode("default")


def test_a_rollout_shows_its_observations_before_the_first_reset_and_takes_no_more_than_it_has_room_for(
    device: str,
) -> None:
    _, ours = rollout_pair(IMAGES, device, compression_method="delta", frame_stack=4)
    assert ours.observations.shape == (SLOTS, 2, *IMAGES.shape)
    zeros = np.zeros(2)
    for transition in recorded("channels first", 2)[:SLOTS]:
        ours.add(transition.obs, zeros, zeros, zeros, th.zeros(2), th.zeros(2))
    with pytest.raises(IndexError, match="call reset"):
        ours.add(transition.obs, zeros, zeros, zeros, th.zeros(2), th.zeros(2))
    assert_same(ours.observations[SLOTS - 1], transition.obs)
