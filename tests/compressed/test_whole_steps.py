"""A step that cannot be stored changes nothing, whichever part of it is wrong; what SB3 takes is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.buffers import DictRolloutBuffer, ReplayBuffer, RolloutBuffer

from sb3_extra_buffers.compressed import (
    CompressedDictRolloutBuffer,
    CompressedMaskableRolloutBuffer,
    CompressedPrioritizedReplayBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
)
from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from sb3_extra_buffers.gpu_buffers import GpuDictRolloutBuffer, GpuRolloutBuffer
from sb3_extra_buffers.persistence.files import describe
from tests.persistence.buffers import (
    ACTIONS,
    ALL_CLASSES,
    IMAGES,
    N_ENVS,
    SLOTS,
    STATE_SHAPE,
    add,
    draw,
    make,
    steps_for,
)
from tests.transitions import assert_same

WRONG: dict[str, Any] = {
    "too many": np.zeros(N_ENVS + 1, np.float32),
    "text": ["a", "b"],
    "ragged": [[1.0], [1.0, 2.0]],
    "of objects": np.array([object()] * N_ENVS),
}
OF_ROLLOUTS = ("obs", "action", "reward", "episode_start", "value", "log_prob")
OF_TRANSITIONS = ("obs", "next_obs", "action", "reward", "done", "infos")


def rollout_arguments(buffer: Any, step: Any, number: int) -> dict[str, Any]:
    obs, _, action, reward, done, _ = step
    arguments = {
        "obs": obs,
        "action": action,
        "reward": reward,
        "episode_start": done,
        "value": th.tensor(reward * 2),
        "log_prob": th.tensor(reward - 1),
    }
    if "Maskable" in type(buffer).__name__:
        arguments["action_masks"] = np.array([[1, number % 2, 1]] * N_ENVS)
    if "Recurrent" in type(buffer).__name__:
        state = th.full(STATE_SHAPE, float(number))
        arguments["lstm_states"] = RNNStates((state, state + 1), (state + 2, state + 3))
    return arguments


def add_wrong(buffer: Any, arguments: dict[str, Any], name: str, value: Any) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011  # whatever it is, as SB3 does it
        buffer.add(**{**arguments, name: value})


@pytest.mark.parametrize("name", [name for name in ALL_CLASSES if "Rollout" in name])
def test_a_wrong_step_leaves_a_rollout_as_it_was(name: str) -> None:
    tried, untouched = make(name), make(name)
    for number, step in enumerate(steps_for(tried, SLOTS)):
        arguments = rollout_arguments(tried, step, number)
        if number in (0, 1, SLOTS - 5, SLOTS - 1):
            for part in arguments:
                for value in WRONG.values():
                    add_wrong(tried, arguments, part, value)
            if isinstance(arguments["obs"], dict):
                add_wrong(tried, arguments, "obs", {"image": arguments["obs"]["image"]})
            add_wrong(tried, arguments, "misspelt", 1)
        tried.add(**arguments)
        untouched.add(**arguments)
    assert tried.full
    assert_same_state(tried, untouched)
    assert_same(draw(tried, 1), draw(untouched, 1))


def assert_same_state(one: Any, other: Any) -> None:
    (meta, arrays), (expected_meta, expected) = describe(one), describe(other)
    assert repr(meta) == repr(expected_meta)
    assert arrays.keys() == expected.keys()
    for name in arrays:
        assert bytes(arrays[name].data) == bytes(expected[name].data), name


@pytest.mark.parametrize("name", [name for name in ALL_CLASSES if "Replay" in name])
def test_a_wrong_transition_leaves_a_replay_buffer_as_it_was(name: str) -> None:
    tried, untouched = make(name), make(name)
    if "Her" in name:
        tried, untouched = (make(name, copy_info_dict=True) for _ in range(2))
    for number, step in enumerate(steps_for(tried, 2 * SLOTS + 7)):
        if number % 10 == 3:
            arguments = dict(zip(OF_TRANSITIONS, step, strict=True))
            for part in OF_TRANSITIONS:
                for value in WRONG.values():
                    add_wrong(tried, arguments, part, value)
        if number % 10 == 4:
            assert_same(draw(tried, number), draw(untouched, number))
            assert tried._state()["pos"] == untouched._state()["pos"]
            for field in tried._saved_fields:
                if field not in ("actions", "rewards", "dones", "timeouts"):
                    assert np.array_equal(getattr(tried, field), getattr(untouched, field)), field
        add(tried, step, number)
        add(untouched, step, number)
    assert_same(draw(tried, 1), draw(untouched, 1))
    if name.startswith("Compressed"):
        assert_same_state(tried, untouched)


def test_masks_of_a_step_that_failed_are_not_those_of_the_next() -> None:
    buffer = make("CompressedMaskableRolloutBuffer")
    assert isinstance(buffer, CompressedMaskableRolloutBuffer)
    arguments = rollout_arguments(buffer, steps_for(buffer, 1)[0], 0)
    add_wrong(buffer, arguments, "reward", ["a", "b"])
    del arguments["action_masks"]
    buffer.add(**arguments)
    assert (buffer.action_masks[0] == 1).all()


def test_a_full_rollout_refuses_more() -> None:
    buffer = make("CompressedRolloutBuffer")
    steps = steps_for(buffer, SLOTS)
    for number, step in enumerate(steps):
        add(buffer, step, number)
    with pytest.raises(IndexError, match=r"has all of its 40 steps: call reset\(\)"):
        buffer.add(**rollout_arguments(buffer, steps[0], 0))
    assert buffer.pos == SLOTS


FORMS = {
    "lists of arrays": {"reward": [np.array([0.5])], "episode_start": [np.array([True])]},
    "plain numbers": {"reward": 0.5, "episode_start": True},
    "rows": {"reward": np.array([[0.5]]), "episode_start": np.array([[1]])},
    "tensors without axes": {"value": th.tensor(0.25), "log_prob": th.tensor(-0.25)},
    "columns": {"value": th.tensor([[0.25]])},
    "no environment axis": {"without axis": True},
    "an action without axes": {"action": np.array(1)},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (CompressedRolloutBuffer, RolloutBuffer),
        (GpuRolloutBuffer, RolloutBuffer),
        (CompressedDictRolloutBuffer, DictRolloutBuffer),
        (GpuDictRolloutBuffer, DictRolloutBuffer),
    ],
)
@pytest.mark.parametrize(
    "space", [spaces.Box(0, 255, (1, 4, 5), np.uint8), spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(4)]
)
def test_every_step_of_a_rollout_that_sb3_takes(form: str, ours: type, theirs: type, space: spaces.Space) -> None:
    is_dict = issubclass(theirs, DictRolloutBuffer)
    buffers = [
        cls(40, spaces.Dict({"key": space}) if is_dict else space, ACTIONS, "cpu", n_envs=1) for cls in (ours, theirs)
    ]
    space.seed(1)
    for buffer in buffers:
        buffer.reset()
    for _ in range(40):
        obs = np.asarray(space.sample())
        options = dict(FORMS[form])
        obs = obs if options.pop("without axis", False) else obs[None]
        arguments = {
            "obs": {"key": obs} if is_dict else obs,
            "action": np.array([1]),
            "reward": np.array([1.0]),
            "episode_start": np.array([0]),
            "value": th.ones(1),
            "log_prob": th.ones(1),
            **options,
        }
        for buffer in buffers:
            buffer.add(**arguments)
    assert_same(draw(buffers[0], 3), draw(buffers[1], 3))


@pytest.mark.parametrize(
    "form",
    [
        {"reward": [np.array([1.5])]},
        {"done": [np.array([True])]},
        {"infos": [{"TimeLimit.truncated": np.array([True])}], "done": [True]},
        {"reward": 2.5, "done": False},
        {"obs": np.full(IMAGES.shape, 9, np.uint8), "next_obs": np.full(IMAGES.shape, 8, np.uint8)},
        {"reward": np.float64(3.0), "action": np.array([2])},
    ],
)
def test_every_transition_that_sb3_takes(form: dict[str, Any]) -> None:
    image = np.full((1, *IMAGES.shape), 7, np.uint8)
    values = (image, image + 1, np.zeros((1, 1)), np.ones(1), np.zeros(1), [{}])
    buffers = [cls(20, IMAGES, ACTIONS, "cpu", 1) for cls in (CompressedReplayBuffer, ReplayBuffer)]
    for buffer in buffers:
        buffer.add(**{**dict(zip(OF_TRANSITIONS, values, strict=True)), **form})
    assert_same(draw(buffers[0], 3), draw(buffers[1], 3))
    for name in ("dones", "timeouts"):
        assert_same(getattr(buffers[0], name), getattr(buffers[1], name))


def interrupt_at_the_end_of_a_step(buffer: BaseCompressedBuffer, patch: pytest.MonkeyPatch) -> None:
    *_, last_store = buffer._stores.values()
    finish_step = last_store.finish_step

    def interrupted() -> None:
        finish_step()
        raise KeyboardInterrupt

    patch.setattr(last_store, "finish_step", interrupted)


def test_every_stored_transition_has_a_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if Ctrl-C comes when it has just been stored."""
    buffer = make("CompressedPrioritizedReplayBuffer")
    assert isinstance(buffer, CompressedPrioritizedReplayBuffer)
    interrupt_at_the_end_of_a_step(buffer, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        add(buffer, steps_for(buffer, 1)[0], 0)
    assert buffer.size() == 1
    assert len(buffer.sample(4).rewards) == 4


def test_an_episode_whose_end_was_stored_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, untouched = (make("CompressedHerReplayBuffer") for _ in range(2))
    for number, step in enumerate(steps_for(tried, SLOTS // 2)):
        add(untouched, step, number)
        with monkeypatch.context() as patched:
            interrupt_at_the_end_of_a_step(tried, patched)
            with pytest.raises(KeyboardInterrupt):
                add(tried, step, number)
    assert (untouched.ep_length > 0).any()
    assert_same_state(tried, untouched)
