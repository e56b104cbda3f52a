"""Places are drawn as SB3 draws them: the same numbers, and the same state of NumPy's generator afterwards."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_extra_buffers.codecs.availability import has_numba
from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.compressed import CompressedReplayBuffer, drawing
from sb3_extra_buffers.compressed.drawing import draw

HIGHS = [1, 2, 3, 4, 5, 255, 256, 257, 49_999, 1 << 20, (1 << 31) + 1, (1 << 32) - 1, 1 << 32, 1 << 40]


@pytest.fixture(autouse=True)
def _compiled_and_as_before() -> Iterator[None]:
    load_kernels(drawing._KERNELS)  # otherwise NumPy's function is used until something else loads numba
    before = np.random.get_state()
    yield
    np.random.set_state(before)


def of_numpy(high: int, n: int) -> Any:
    return np.random.randint(0, high, size=n)


@pytest.mark.parametrize("high", HIGHS)
def test_the_same_numbers_and_the_same_state_afterwards(high: int) -> None:
    for seed, n in [(0, 32), (1, 1), (2, 0), (3, 1000)]:
        found = []
        for function in (of_numpy, draw):
            np.random.seed(seed)
            np.random.normal(size=3)  # leaves a number for later, which must stay
            np.random.randint(0, 9, size=600 + seed)
            found.append([*(function(high, n) for _ in range(3)), np.random.normal(size=3)])
        for ours, theirs in zip(*found, strict=True):
            np.testing.assert_array_equal(ours, theirs)
            assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("n_steps", [1, 7, 10, 25])
def test_slots_and_environments_are_those_of_sb3(n_steps: int, optimized: bool) -> None:
    """With and without a ``_get_samples`` of the user's own."""

    class Recording(CompressedReplayBuffer):
        drawn: Any = None

        def _get_samples(self, batch_inds: Any, env: Any = None) -> Any:
            self.drawn = batch_inds
            return super()._get_samples(batch_inds, env)

    box, batches, states = spaces.Box(-1, 1, (3,), np.float32), [], []
    options: Any = {"optimize_memory_usage": optimized, "handle_timeout_termination": not optimized}
    buffers = [cls(30, box, box, "cpu", 3, **options) for cls in (ReplayBuffer, CompressedReplayBuffer, Recording)]
    for buffer in buffers:
        for step in range(n_steps):
            obs = np.arange(9, dtype=np.float32).reshape(3, 3) + 9 * step
            buffer.add(obs, obs + 9, obs, obs[:, 0], np.zeros(3, bool), [{}] * 3)
        np.random.seed(3)
        batches.append([buffer.sample(40) for _ in range(2)])
        states.append(np.random.random_sample())
    for batch in batches[1:]:
        for ours, theirs in zip(batch, batches[0], strict=True):
            assert all(map(th.equal, ours[:5], theirs[:5]))
    assert len(set(states)) == 1
    assert len(buffers[2].drawn) == 40


def test_a_get_samples_that_was_assigned_is_called() -> None:
    box = spaces.Box(-1, 1, (3,), np.float32)
    zeros = np.zeros((1, 3), np.float32)
    buffer = CompressedReplayBuffer(5, box, box, "cpu")
    buffer.add(zeros, zeros, zeros, np.zeros(1), np.zeros(1), [{}])
    buffer._get_samples = lambda batch_inds, env=None: batch_inds  # type: ignore[method-assign]
    assert buffer.sample(4).tolist() == [0] * 4
    del buffer._get_samples
    with patch.object(CompressedReplayBuffer, "_get_samples", return_value="patched"):
        assert buffer.sample(4) == "patched"


@pytest.mark.parametrize("of", [list, tuple, iter])
def test_infos_may_be_any_sequence_that_sb3_takes(of: Any) -> None:
    box = spaces.Box(-1, 1, (3,), np.float32)
    zeros, found = np.zeros((2, 3), np.float32), []
    for cls in (ReplayBuffer, CompressedReplayBuffer):
        buffer = cls(10, box, box, "cpu", 2)
        for truncated in ([True, False], [False, True], [False, False]):
            infos = of([{"TimeLimit.truncated": flag} for flag in truncated])
            buffer.add(zeros, zeros, zeros, np.zeros(2), np.ones(2), infos)
        found.append(buffer.timeouts)
    np.testing.assert_array_equal(*found)


def test_nothing_to_draw_from() -> None:
    with pytest.raises(ValueError, match="high"):
        draw(0, 3)


def test_another_generator() -> None:
    before = np.random.get_bit_generator()
    try:
        for generator in (np.random.PCG64, np.random.MT19937, np.random.Philox):
            found = []
            for function in (of_numpy, draw):
                np.random.set_bit_generator(generator(7))
                found.append([function(1000, 40), function(5, 40), np.random.random_sample(3)])
            for ours, theirs in zip(*found, strict=True):
                np.testing.assert_array_equal(ours, theirs)
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.skipif(not has_numba(), reason="needs numba")
def test_numpys_function_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np.random, "randint", None)
    assert len(draw(1000, 32)) == 32


def test_numba_is_not_loaded_for_it() -> None:
    code = (
        "import sys; from sb3_extra_buffers.compressed.drawing import draw; draw(5, 3); print('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_two_threads_together_draw_what_one_would() -> None:
    np.random.seed(5)
    expected = np.sort(np.random.randint(0, 1 << 20, size=400 * 64))
    np.random.seed(5)
    found: list[Any] = []

    def work(function: Any) -> None:
        found.extend(function(1 << 20, 64) for _ in range(200))

    threads = [threading.Thread(target=work, args=(function,)) for function in (of_numpy, draw)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(np.sort(np.concatenate(found)), expected)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
def test_ctrl_c_leaves_the_generator_unlocked() -> None:
    def press(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    handlers = {signal.SIGALRM: press, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    n_pressed = 0
    try:
        for i in range(1000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 * (1 + i % 30))
                while True:
                    draw(1000, 32)
            except KeyboardInterrupt:
                n_pressed += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert n_pressed == 1000
    other = threading.Thread(target=np.random.random_sample, daemon=True)
    other.start()
    other.join(timeout=10)
    assert not other.is_alive()
