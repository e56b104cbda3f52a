"""Whatever is raised, and wherever: a transition is there as a whole or not at all, and what was there stays."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

import sb3_extra_buffers
from sb3_extra_buffers.gpu_buffers.arena import DeviceArena
from sb3_extra_buffers.gpu_buffers.device_codecs import DeviceDelta
from sb3_extra_buffers.gpu_buffers.frame_store import DeviceFrameStore
from sb3_extra_buffers.gpu_buffers.transfer import Staging
from tests.gpu.helpers import IMAGES, SPACES, recorded, replay_pair, rollout_pair
from tests.transitions import Transition, add_to_replay, copied, sample_both

SOURCES = str(Path(sb3_extra_buffers.__file__).parent)
METHODS = ["delta", "rle", "none"]


PLACES = [
    (DeviceFrameStore, "_request_report"),
    (DeviceFrameStore, "_place_records"),
    (DeviceFrameStore, "_write_records"),
    (DeviceDelta, "measure"),
    (DeviceDelta, "write"),
    (DeviceArena, "allocate"),
    (Staging, "send"),
]


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0].__name__}.{place[1]}")
@pytest.mark.parametrize("after", [False, True], ids=["before it", "after it"])
def test_records_whose_writing_was_cut_short_are_written_later(
    place: tuple[Any, str], after: bool, device: str, monkeypatch: Any
) -> None:
    buffers = replay_pair(IMAGES, device, slots=9, compression_method="delta", frame_stack=4)
    owner, name = place
    original = getattr(owner, name)
    failures = 0
    for step, transition in enumerate(recorded("channels first", 2)[:24]):
        if step in (5, 15):

            def fails(*args: Any) -> Any:
                monkeypatch.setattr(owner, name, original)
                if after:
                    original(*args)
                raise RuntimeError("cut short")

            monkeypatch.setattr(owner, name, fails)
        before = buffers[1].pos
        try:
            buffers[1].add(*copied(transition))
        except RuntimeError:
            failures += 1
            assert buffers[1].pos == before, "nothing of it is stored"
            sample_both(*buffers, batch_size=2, seed=step)
            buffers[1].check_device()
        else:
            buffers[0].add(*copied(transition))
    monkeypatch.setattr(owner, name, original)
    assert failures
    sample_both(*buffers, batch_size=8, seed=1)
    buffers[1].check()


WRONG = {
    "action": {"action": np.zeros((3, 1))},
    "reward": {"reward": np.zeros(3)},
    "reward without a number": {"reward": ["much", "more"]},
    "done": {"done": np.zeros(3)},
    "infos": {"infos": [{}]},
    "no infos": {"infos": [None, None]},
    "next observation": {"next_obs": np.zeros((2, 4, 8, 10), np.uint8)},
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("method", METHODS)
def test_a_wrong_argument_changes_nothing(method: str, wrong: str, device: str) -> None:
    plain, ours = replay_pair(IMAGES, device, slots=20, compression_method=method, frame_stack=4)
    transitions = recorded("channels first", 2)
    for transition in transitions[:45]:
        add_to_replay([plain, ours], transition)
    if wrong == "infos":  # one truth value is good for all environments, as in SB3
        pytest.skip("as in SB3")
    with pytest.raises((ValueError, TypeError, AttributeError)):
        ours.add(*copied(transitions[45])._replace(**WRONG[wrong]))
    assert ours.pos == plain.pos
    sample_both(plain, ours, batch_size=60, seed=0)
    ours.check_device()
    add_to_replay([plain, ours], transitions[46])
    sample_both(plain, ours, batch_size=60, seed=1)


@pytest.mark.parametrize("method", METHODS)
def test_fields_of_every_form_that_sb3_takes(method: str, device: str) -> None:
    plain, ours = replay_pair(IMAGES, device, n_envs=1, slots=20, compression_method=method, frame_stack=4)
    obs = np.zeros((1, *IMAGES.shape), np.uint8)
    one = np.array([1.0])
    for fields in (
        (np.array([3]), one, np.array([True]), [{"TimeLimit.truncated": True}]),
        (np.array([[3]]), [one], [np.array([True])], [{"TimeLimit.truncated": np.array([True])}]),
        (np.array([[2]]), one[:, None], [1], [{}]),
    ):
        for buffer in (plain, ours):
            buffer.add(obs, obs, *fields)
    sample_both(plain, ours, batch_size=20, seed=0)


@pytest.mark.parametrize("method", METHODS)
def test_fields_that_are_tensors(method: str, device: str) -> None:
    plain, ours = replay_pair(IMAGES, device, slots=20, compression_method=method, frame_stack=4)
    for obs, next_obs, action, reward, done, infos in map(copied, recorded("channels first", 2)[:30]):
        plain.add(obs, next_obs, action, reward, done, infos)
        ours.add(obs, next_obs, *(th.tensor(part, device=device) for part in (action, reward, done)), infos)
    sample_both(plain, ours, batch_size=60, seed=0)


def in_finalizer(frame: FrameType | None) -> bool:
    """Python ignores whatever is raised there, Ctrl-C included."""
    while frame is not None and frame.f_code.co_filename.startswith(SOURCES):
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@contextmanager
def interrupted_at(line: int) -> Iterator[list[str]]:
    """Ctrl-C at the ``line``-th line of this package that is executed. Yields where that was."""
    seen, where = 0, []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        name = frame.f_code.co_filename
        if not name.startswith(SOURCES) or name.endswith("interruption.py"):
            return None
        if event == "line" and not in_finalizer(frame):
            seen += 1
            if seen == line:
                sys.settrace(None)
                where.append(f"{Path(name).name}:{frame.f_lineno}")
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield where
    finally:
        sys.settrace(before)


def add_one(plain: Any, ours: Any, transition: Transition, device: str, line: int) -> str | None:
    """Add to both, to ours with a Ctrl-C at a line. It may have come too late to keep the transition out."""
    obs, next_obs, *rest = copied(transition)
    if device != "host":
        obs, next_obs = th.tensor(obs, device=device), th.tensor(next_obs, device=device)
    pos, where = ours.pos, None
    try:
        with interrupted_at(line) as found:
            ours.add(obs, next_obs, *rest)
    except KeyboardInterrupt:
        where = found[0]
    if ours.pos != pos:
        plain.add(*copied(transition))
    return where


@pytest.mark.parametrize(
    ("method", "source", "n_steps"), [("none", "host", 400), ("delta", "host", 120), ("rle", "device", 120)]
)
@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_ctrl_c_at_any_line_of_add_and_sample(method: str, source: str, n_steps: int, device: str) -> None:
    space = spaces.Box(0, 255, (4, 6, 6), np.uint8)
    plain, ours = replay_pair(space, device, slots=24, compression_method=method, frame_stack=4)
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 9, size=(2, 4, 6, 6), dtype=np.uint8)
    check_ctrl_c(plain, ours, frames, rng, device if source == "device" else "host", n_steps)


@pytest.mark.parametrize("method", METHODS)
def test_ctrl_c_in_host_memory(method: str, device: str) -> None:
    space = spaces.Box(0, 255, (4, 6, 6), np.uint8)
    plain, ours = replay_pair(space, device, slots=24, compression_method=method, frame_stack=4)
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 9, size=(2, 4, 6, 6), dtype=np.uint8)
    check_ctrl_c(plain, ours, frames, rng, "host", 900)


def check_ctrl_c(
    plain: Any, ours: Any, frames: np.ndarray, rng: np.random.Generator, source: str, n_steps: int
) -> None:
    visited, hits = set(), 0
    # From one step to the next the interruption comes a little later, so every line has its turn.
    for step in range(n_steps):
        following = frames.copy()
        following[:, :-1], following[:, -1] = frames[:, 1:], rng.integers(0, 2 + step % 9, size=(2, 6, 6))
        transition = Transition(
            frames, following, np.zeros((2, 1), np.int64), rng.normal(size=2), np.zeros(2), [{}, {}]
        )
        line = 1 + step * 7 % 331 if step > 5 else 10_000
        where = add_one(plain, ours, transition, source, line)
        frames = following
        if step % 9 == 1 and step > 5:
            try:
                with interrupted_at(1 + step * 5 % 397) as found:
                    ours.sample(2)
            except KeyboardInterrupt:
                where = found[0]
        hits += where is not None
        visited.add(where)
        if step > 2 and step % 12 == 0:
            ours.check_device()
            try:
                sample_both(plain, ours, batch_size=4, seed=step)
            except AssertionError as error:
                raise AssertionError(f"step {step}, after Ctrl-C at {where}") from error
    assert hits > n_steps / 4
    assert len(visited) > 20
    sample_both(plain, ours, batch_size=24, seed=0)


@pytest.mark.parametrize("name", ["actions", "rewards", "episode_starts", "values", "log_probs"])
def test_ctrl_c_while_a_rollout_is_fetched_loses_none_of_it(name: str, device: str) -> None:
    plain, ours = rollout_pair(SPACES["float32"], device, slots=5)
    for line in range(1, 30):
        plain.reset()
        ours.reset()
        for transition in recorded("float32", 2)[:5]:
            rest = transition.action, transition.reward, transition.done, *map(th.tensor, (transition.reward,) * 2)
            plain.add(transition.obs.copy(), *rest)
            ours.add(transition.obs.copy(), *(th.as_tensor(part, device=device) for part in rest))
        try:
            with interrupted_at(line):
                getattr(ours, name)
        except KeyboardInterrupt:
            np.testing.assert_array_equal(getattr(ours, name), getattr(plain, name))
        else:
            assert line > 10
            return


@pytest.mark.parametrize("place", ["prepare", "write_step"])
def test_keys_of_a_dict_stay_together(
    place: str, either_way: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours = replay_pair(SPACES["Dict"], device, slots=6, frame_stack=None, compression_method="delta")
    for transition in recorded("Dict", 2)[:9]:
        add_to_replay([plain, ours], transition)
    last = list(ours._stores.values())[-1]
    original = getattr(last, place)

    def once(*args: Any) -> None:
        monkeypatch.setattr(last, place, original)
        raise KeyboardInterrupt

    monkeypatch.setattr(last, place, once)
    with pytest.raises(KeyboardInterrupt):
        ours.add(*copied(recorded("Dict", 2)[45]))
    if ours.pos != plain.pos:
        plain.add(*copied(recorded("Dict", 2)[45]))
    sample_both(plain, ours, batch_size=6, seed=0)
