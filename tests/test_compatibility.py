"""Programs written for version 0.5: every name, argument and import path that has moved still works."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN

from sb3_extra_buffers.compatibility import MODULES, NAMES
from sb3_extra_buffers.compatibility.device import estimate_max_slot_bytes
from sb3_extra_buffers.compressed import (
    CompressedDictReplayBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
    find_buffer_dtypes,
)
from tests.transitions import assert_same, play

MOVED = [(module, name) for module, names in {**NAMES, **MODULES}.items() for name in names]


@pytest.mark.parametrize(("module", "name"), MOVED)
def test_a_name_that_has_moved(module: str, name: str) -> None:
    moved = {**NAMES, **MODULES}[module][name]
    with pytest.warns(DeprecationWarning, match="is deprecated: use ") as caught:
        found = getattr(importlib.import_module(module), name)
    assert caught[0].filename == __file__
    if moved.make is None:
        home, _, attribute = moved.new.rpartition(".")
        assert found is getattr(importlib.import_module(home), attribute)


@pytest.mark.parametrize("module", [*NAMES, *MODULES])
def test_a_name_that_never_was(module: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'no_such_name'"):
        importlib.import_module(module).no_such_name  # noqa: B018


@pytest.mark.parametrize("module", MODULES)
def test_modules_that_are_gone_can_be_imported_first(module: str) -> None:
    name = next(iter(MODULES[module]))
    code = f"import {module}\nfrom {module} import {name}\nassert {module}.{name} == {name}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_types() -> None:
    import sb3_extra_buffers
    from sb3_extra_buffers.recording import DummyRecordBuffer

    top: Any = sb3_extra_buffers
    with pytest.deprecated_call():
        assert isinstance(np.float32(1), top.NumberType)
        assert isinstance(DummyRecordBuffer(), top.ReplayLike)
        assert (2, 7) <= top.sb3_version() < (4,)


IMAGES = spaces.Box(0, 255, (4, 8, 9), np.uint8)


def filled(space: spaces.Space, **options: Any) -> Any:
    cls = CompressedDictReplayBuffer if isinstance(space, spaces.Dict) else CompressedReplayBuffer
    buffer = cls(20, space, spaces.Discrete(5), "cpu", n_envs=2, **options)
    for transition in islice(play(space, 2), 7):
        buffer.add(*transition)
    return buffer


class TestBuffers:
    def test_attributes(self) -> None:
        buffer = filled(IMAGES)
        with pytest.deprecated_call(match="find_buffer_dtypes"):
            assert buffer.dtypes == find_buffer_dtypes(IMAGES.shape)
        with pytest.deprecated_call():
            assert buffer.flatten_config == {"shape": 288, "dtype": np.uint8}
        with pytest.deprecated_call(match=r"buffer\.observations\[idx, env_idx\]") as caught:
            assert_same(buffer.reconstruct_obs(3, 1), buffer.observations[3, 1])
        assert caught[0].filename == __file__
        with pytest.deprecated_call():
            assert_same(buffer.reconstruct_nextobs(3, 1), buffer.next_observations[3, 1])

    def test_attributes_of_dict_spaces(self) -> None:
        buffer = filled(spaces.Dict({"image": IMAGES}))
        with pytest.deprecated_call():
            assert buffer.dtypes["image"]["elem_type"] == np.uint8
        with pytest.deprecated_call():
            assert_same(buffer.reconstruct_obs(3, 1)["image"], buffer.observations["image"][3, 1])

    def test_a_flattened_rollout(self) -> None:
        buffer = CompressedRolloutBuffer(4, IMAGES, spaces.Discrete(5), "cpu", n_envs=2)
        for obs, _, action, reward, done, _ in islice(play(IMAGES, 2), 4):
            buffer.add(obs, action, reward, done, th.zeros(2), th.zeros(2))
        next(buffer.get(2))
        with pytest.deprecated_call():
            assert_same(buffer.reconstruct_obs(5), buffer.observations[5])

    @pytest.mark.parametrize(
        ("method", "options"),
        [
            ("none1", {}),
            ("zstd0", {"threads": 2}),
            ("rle", {"elem_type": np.uint8, "runs_type": np.uint16}),
            ("gzip3", {"elem_type": np.uint8, "runs_type": np.uint16}),
        ],
    )
    def test_methods_and_options(self, method: str, options: dict[str, Any]) -> None:
        dtypes = find_buffer_dtypes(IMAGES.shape, np.uint8, method)
        buffer = filled(IMAGES, compression_method=method, compression_kwargs=options, dtypes=dtypes)
        assert_same(buffer.observations[:7], filled(IMAGES).observations[:7])

    def test_saving_does_not_ask_for_old_attributes(self, tmp_path: Path) -> None:
        filled(IMAGES).save(tmp_path / "buffer")  # warnings are errors


@pytest.mark.parametrize("level", [None, 3])
def test_estimates_of_memory_on_a_device(level: int | None) -> None:
    expected = estimate_max_slot_bytes((4, 84, 84), th.uint8, "zstd", level=level)
    found = estimate_max_slot_bytes((4, 84, 84), th.uint8, "zstd", compresslevel=level, runs_type=th.uint16)
    assert found == expected


@pytest.mark.skipif(not find_spec("numpy._core"), reason="NumPy 2 wrote it, in modules that this NumPy lacks")
def test_a_model_that_version_0_5_saved() -> None:
    """DQN on CartPole after 100 steps, net_arch=[4], with the buffer of find_buffer_dtypes((4,), np.float32, "rle")."""
    path = Path(__file__).parent / "persistence/models/dqn_of_version_0_5.zip"
    with pytest.deprecated_call(match="use sb3_extra_buffers.compressed.CompressedReplayBuffer"):
        model = DQN.load(path, env=gym.make("CartPole-v1"))
    assert type(model.replay_buffer) is CompressedReplayBuffer
    model.learn(60)
    assert model.replay_buffer.size() == 60
