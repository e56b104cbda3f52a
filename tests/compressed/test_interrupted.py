"""Whatever raises inside ``add``, and wherever, what was stored stays as it was, and nothing is half-written."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_extra_buffers.compressed import CompressedDictReplayBuffer, CompressedReplayBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.storage.arena import Arena
from tests.methods import installed
from tests.transitions import assert_same, play

IMAGES = spaces.Box(0, 255, (4, 12, 12), np.uint8)
ACTIONS = spaces.Discrete(5)
SLOTS, N_ENVS = 40, 2
methods = pytest.mark.parametrize("method", ["auto", *installed("delta", "zstd-dict/3", "gzip1", "none")])


def pair(method: str) -> tuple[ReplayBuffer, CompressedReplayBuffer]:
    arguments = (SLOTS * N_ENVS, IMAGES, ACTIONS, "cpu", N_ENVS)
    return ReplayBuffer(*arguments), CompressedReplayBuffer(*arguments, compression_method=method)


def assert_equal(plain: ReplayBuffer, ours: CompressedReplayBuffer) -> None:
    ours.check()
    assert (plain.pos, plain.full) == (ours.pos, ours.full)
    for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
        assert_same(np.asarray(getattr(plain, name)), np.asarray(getattr(ours, name)))


class Interruptions:
    """Raises KeyboardInterrupt at the ``n``-th call or line inside the package, or inside SB3's HER."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if not any(name in frame.f_code.co_filename for name in ("sb3_extra_buffers", "her_replay_buffer")):
            return None
        if event in ("call", "line"):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def interrupted(work: Any, n: int) -> bool:
    """Whether ``work`` was interrupted at the ``n``-th line, rather than done before."""
    trace = Interruptions(n)
    threading.settrace(None)
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@methods
def test_an_interruption_between_any_two_calls_stores_a_step_as_a_whole_or_not_at_all(method: str) -> None:
    """One line further each time, through adds that encode, grow, wrap, release and decide."""
    plain, ours = pair(method)
    steps = play(IMAGES, N_ENVS, action_space=ACTIONS)
    n_interrupted = 0
    for number, step in enumerate(itertools.islice(steps, 400)):
        before = ours.pos
        if interrupted(lambda step=step: ours.add(*step), 1 + number * 7 % 400):
            n_interrupted += 1
            ours.check()
        if ours.pos == before:
            ours.add(*step)
        plain.add(*step)
        if number % 20 == 0:
            assert_equal(plain, ours)
    assert_equal(plain, ours)
    assert n_interrupted > 100


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers")
@methods
def test_real_signals_at_random_moments(method: str) -> None:
    """In new buffers, which have much to make yet, and in those that go round."""
    rng, n_interrupted = np.random.default_rng(0), 0
    played = list(itertools.islice(play(IMAGES, N_ENVS, action_space=ACTIONS), 300))

    is_armed = False

    def interrupt(*_: Any) -> None:
        nonlocal is_armed
        if is_armed:  # a signal that is late must not hit the test itself
            is_armed = False
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(6):
            plain, ours = pair(method)
            for number, step in enumerate(played):
                before = ours.pos
                try:
                    is_armed = True
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 4e-4))
                    ours.add(*step)
                    is_armed = False
                except KeyboardInterrupt:
                    n_interrupted += 1
                    ours.check()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                if ours.pos == before:
                    ours.add(*step)
                plain.add(*step)
                if number % 50 == 0:
                    assert_equal(plain, ours)
            assert_equal(plain, ours)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert n_interrupted > 20


@methods
def test_memory_that_runs_out_changes_nothing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = pair(method)
    steps = play(IMAGES, N_ENVS, action_space=ACTIONS)
    for step in itertools.islice(steps, 70):
        plain.add(*step), ours.add(*step)

    def no_memory(*_: Any) -> int:
        raise MemoryError

    failed = 0
    for number, step in enumerate(itertools.islice(steps, 200)):
        if number % 3 == 0:
            with monkeypatch.context() as patch:
                patch.setattr(Arena, "allocate", no_memory)
                try:
                    ours.add(*step)
                except MemoryError:
                    failed += 1
                    assert_equal(plain, ours)
                    continue
        else:
            ours.add(*step)
        plain.add(*step)
    assert_equal(plain, ours)
    assert failed


class TestRewardsAsSb3TakesThem:
    def add(self, buffers: Iterator[ReplayBuffer] | list[ReplayBuffer], n_envs: int, **changed: Any) -> None:
        image = np.full((n_envs, *IMAGES.shape), 7, np.uint8)
        step: dict[str, Any] = {
            "obs": image, "next_obs": image + 1, "action": np.zeros((n_envs, 1)), "reward": np.ones(n_envs),
            "done": np.zeros(n_envs), "infos": [{}] * n_envs, **changed,
        }  # fmt: skip
        for buffer in buffers:
            buffer.add(**step)

    @pytest.mark.parametrize(
        "changed",
        [
            {"reward": [np.array([1.5])]},
            {"done": [np.array([True])]},
            {"infos": [{"TimeLimit.truncated": np.array([True])}], "done": [True]},
            {"reward": 2.5, "done": False},
            {"obs": np.full(IMAGES.shape, 9, np.uint8), "next_obs": np.full(IMAGES.shape, 8, np.uint8)},
            {"reward": np.float64(3.0), "action": np.array([2])},
        ],
    )
    def test_of_one_environment(self, changed: dict[str, Any]) -> None:
        arguments = (20, IMAGES, ACTIONS, "cpu", 1)
        buffers = [ReplayBuffer(*arguments), CompressedReplayBuffer(*arguments)]
        self.add(buffers, 1, **changed)
        assert_equal(*buffers)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "changed",
        [
            {"reward": np.ones(3)},
            {"reward": "much"},
            {"done": np.zeros((2, 2))},
            {"infos": [{"TimeLimit.truncated": "yes"}, {}]},
            {"infos": None},
            {"action": np.zeros(5)},
        ],
    )
    def test_what_does_not_fit_is_refused_before_anything_is_stored(self, changed: dict[str, Any]) -> None:
        arguments = (20, IMAGES, ACTIONS, "cpu", 2)
        buffers = [ReplayBuffer(*arguments), CompressedReplayBuffer(*arguments)]
        for _ in range(15):
            self.add(buffers, 2)
        with pytest.raises((ValueError, TypeError)):
            self.add(buffers[1:], 2, **changed)
        assert_equal(*buffers)  # type: ignore[arg-type]

    def test_in_a_dict_buffer_a_bad_key_leaves_the_others_alone(self) -> None:
        space = spaces.Dict({"a": IMAGES, "b": spaces.Box(-1, 1, (3,), np.float32)})
        buffer = CompressedDictReplayBuffer(20, space, ACTIONS, "cpu")
        good = {"a": np.zeros((1, *IMAGES.shape), np.uint8), "b": np.zeros((1, 3), np.float32)}
        for _ in range(5):
            self.add([buffer], 1, obs=good, next_obs=good)
        for bad in (good | {"b": np.zeros((1, 4), np.float32)}, {"a": good["a"]}):
            with pytest.raises((ValueError, KeyError)):
                self.add([buffer], 1, obs=good, next_obs=bad)
            buffer.check()
            assert buffer.pos == 5


def test_an_interrupted_reset_leaves_a_valid_rollout_buffer() -> None:
    buffer = CompressedRolloutBuffer(20, IMAGES, ACTIONS, "cpu", n_envs=N_ENVS, compression_method="delta")
    images = [step.obs for step in itertools.islice(play(IMAGES, N_ENVS, action_space=ACTIONS), 400)]
    for number in range(60):
        interrupted(buffer.reset, 1 + number * 3)
        buffer.check()
        buffer.reset()
        for image in images[number : number + 15]:
            buffer.observations[buffer.pos] = image
            buffer.pos += 1
        buffer.check()
        expected = np.stack(images[number : number + 15]).astype(buffer.observations.dtype)  # float32 in SB3 2.7
        assert_same(np.asarray(buffer.observations)[:15], expected)
