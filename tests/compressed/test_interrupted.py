"""Whatever raises inside ``add``, and wherever, what was stored stays as it was, and nothing is half-written."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_extra_buffers.codecs.registry import parse_method
from sb3_extra_buffers.compressed import CompressedReplayBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.storage.arena import Arena
from sb3_extra_buffers.storage.config import CodecRecipe
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
    """Raises KeyboardInterrupt at the ``n``-th call or line inside the package, or inside SB3's HER.

    :param delayed: Like a real Ctrl-C, which ``uninterrupted()`` delays.
    """

    def __init__(self, n: int, delayed: bool = False) -> None:
        self.left, self._delayed = n, delayed

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if not any(name in frame.f_code.co_filename for name in ("sb3_extra_buffers", "her_replay_buffer")):
            return None
        if event in ("call", "line"):
            self.left -= 1
            if self.left == 0 and self._delayed:
                handler: Any = signal.getsignal(signal.SIGINT)
                handler(signal.SIGINT, frame)
            elif self.left == 0:
                raise KeyboardInterrupt
        return self


def interrupted(work: Any, n: int, delayed: bool = False) -> bool:
    """Whether ``work`` was interrupted at the ``n``-th line, rather than done before."""
    trace = Interruptions(n, delayed)
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


def test_sampling_that_is_interrupted_right_after_a_change_of_codec_reads_the_right_observations_later() -> None:
    plain, ours = pair("auto")
    recipes = itertools.cycle(
        [CodecRecipe(parse_method(name)) for name in installed("delta", "gzip1", "bitpack", "none")]
    )
    steps, store, n_interrupted = play(IMAGES, N_ENVS, action_space=ACTIONS), ours._stores[""], 0
    for line in range(1, 160):
        for step in itertools.islice(steps, 9):
            plain.add(*step)
            ours.add(*step)
        if line % 2:
            store.change_codec(next(recipes))
        else:
            store.release_earlier()
        n_interrupted += interrupted(lambda: ours.sample(8), line, delayed=True)
        assert_equal(plain, ours)
    assert n_interrupted > 80


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

    previous = signal.signal(signal.SIGINT, interrupt)
    previous_alarm = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
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
        signal.signal(signal.SIGALRM, previous_alarm)
        signal.signal(signal.SIGINT, previous)
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
