"""The real LeRobot: what it writes is imported without a change, and it reads what buffers export."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

REASON = "make test-lerobot installs LeRobot into an environment of its own"
# torchvision, which LeRobot imports, has operators that need CUDA's libraries. Without them, it lacks these two.
WITHOUT_CUDA = """
import torch as th
if th.version.cuda is None:
    for name in ("nms", "qnms"):
        th.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
exec(WITHOUT_CUDA)
pytest.importorskip("lerobot", reason=REASON)

from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: E402

from sb3_extra_buffers.compressed import CompressedDictReplayBuffer, CompressedReplayBuffer  # noqa: E402
from tests.transitions import add_to_replay, play  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs/lerobot.md"
pytestmark = pytest.mark.filterwarnings("default")  # of LeRobot and its relatives

N_ENVS, SLOTS = 2, 40
FIRST = spaces.Box(0, 255, (3, 24, 16), np.uint8)
LAST = spaces.Box(0, 255, (24, 16, 3), np.uint8)
VECTOR = spaces.Box(-np.inf, np.inf, (5,), np.float32)
CONTINUOUS = spaces.Box(-1, 1, (2,), np.float32)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def images_first(value: th.Tensor) -> np.ndarray:
    """LeRobot's image, which has channels first and values from 0 to 1."""
    return (value * 255).round().to(th.uint8).numpy()


@pytest.mark.parametrize(
    ("cls", "space", "actions"),
    [
        (CompressedReplayBuffer, FIRST, CONTINUOUS),
        (CompressedReplayBuffer, LAST, spaces.Discrete(3)),
        (CompressedReplayBuffer, VECTOR, spaces.MultiDiscrete([2, 3])),
        (CompressedReplayBuffer, spaces.Discrete(4), spaces.MultiBinary(2)),
        (CompressedDictReplayBuffer, spaces.Dict({"top": FIRST, "wrist": LAST, "state": VECTOR}), CONTINUOUS),
    ],
)
def test_a_buffer_as_a_dataset_and_back(cls: Any, space: Any, actions: Any, tmp_path: Path) -> None:
    buffer = cls(SLOTS * N_ENVS, space, actions, device="cpu", n_envs=N_ENVS)
    kept = list(itertools.islice(play(space, N_ENVS, action_space=actions), SLOTS + 7))
    for step in kept:
        add_to_replay([buffer], step)
    kept = kept[-SLOTS:]
    buffer.to_lerobot("test/buffer", fps=10, root=tmp_path / "dataset", task="play")
    dataset = LeRobotDataset("test/buffer", root=tmp_path / "dataset")
    assert len(dataset) == SLOTS * N_ENVS
    names = {name: "" for name in dataset.features if name.startswith("observation")}
    if isinstance(space, spaces.Dict):
        names = {"observation.images.top": "top", "observation.images.wrist": "wrist", "observation.state": "state"}
    for index, (env, number) in enumerate(itertools.product(range(N_ENVS), range(SLOTS))):
        item, step = dataset[index], kept[number]
        for name, key in names.items():
            expected = (step.obs[key] if key else step.obs)[env]
            found = item[name].numpy()
            if dataset.features[name]["dtype"] == "image":
                found = images_first(item[name])
                expected = expected if expected.shape[0] == 3 else expected.transpose(2, 0, 1)
            np.testing.assert_array_equal(found.reshape(expected.shape), expected)
        np.testing.assert_array_equal(item["action"].numpy().reshape(actions.shape), step.action[env])
        assert item["next.reward"] == step.reward[env]
        assert item["task"] == "play"
        truncated = bool(step.infos[env].get("TimeLimit.truncated", False))
        is_last = index + 1 == len(dataset) or dataset[index + 1]["frame_index"] == 0
        assert item["next.done"] == bool(step.done[env]) or is_last
        assert item["next.truncated"] == truncated or (is_last and not step.done[env])

    again = cls.from_lerobot(tmp_path / "dataset", "cpu", action_space=actions)
    assert again.size() == SLOTS * N_ENVS
    np.testing.assert_array_equal(again.rewards[:, 0], buffer.rewards[(np.arange(SLOTS) + 7) % SLOTS].T.reshape(-1))
    again.to_lerobot("test/again", fps=10, root=tmp_path / "again", task="play")
    second = LeRobotDataset("test/again", root=tmp_path / "again")
    for one, other in zip(range(len(dataset)), range(len(second)), strict=True):
        first_item, second_item = dataset[one], second[other]
        for name, value in first_item.items():
            # A channels-last image is channels-first after an import.
            assert name == "task" or th.equal(value, second_item[name]), name


def episodes_of(dataset: LeRobotDataset) -> Iterator[list[dict[str, Any]]]:
    items = [dataset[index] for index in range(len(dataset))]
    for _, episode in itertools.groupby(items, lambda item: int(item["episode_index"])):
        yield list(episode)


@pytest.mark.parametrize("with_rewards", [True, False])
def test_a_dataset_that_lerobot_wrote(with_rewards: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    features: dict[str, Any] = {
        "observation.images.top": {"dtype": "image", "shape": (24, 16, 3), "names": ["height", "width", "channels"]},
        "observation.images.wrist": {"dtype": "image", "shape": (3, 8, 9), "names": ["channels", "height", "width"]},
        "observation.state": {"dtype": "float32", "shape": (5,), "names": list("abcde")},
        "observation.gripper": {"dtype": "float32", "shape": (1,), "names": None},
        "observation.contact": {"dtype": "bool", "shape": (2,), "names": None},
        "observation.depth": {"dtype": "int16", "shape": (2, 4, 3), "names": None},
        "action": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
    }
    if with_rewards:
        features |= {
            "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
            "next.done": {"dtype": "bool", "shape": (1,), "names": None},
        }
    dataset = LeRobotDataset.create("test/robot", 30, features, root=tmp_path / "robot", use_videos=False)
    lengths = [7, 2, 90, 30]
    for number, length in enumerate(lengths):
        for step in range(length):
            frame = {
                name: rng.integers(0, 256, feature["shape"], dtype=np.uint8)
                if feature["dtype"] == "image"
                else (100 * rng.normal(size=feature["shape"])).astype(feature["dtype"])
                for name, feature in features.items()
            }
            frame["observation.contact"] = rng.integers(0, 2, 2).astype(bool)
            if with_rewards:
                frame["next.done"] = np.array([step == length - 1 and number % 2 == 0])
            dataset.add_frame({**frame, "task": f"task {number % 2}"})
        dataset.save_episode()
    dataset.finalize()

    dataset = LeRobotDataset("test/robot", root=tmp_path / "robot")
    buffer = CompressedDictReplayBuffer.from_lerobot(dataset, "cpu", storage="mmap", path=tmp_path / "buffer")
    keys = {name.rpartition(".")[2]: name for name in features if name.startswith("observation")}
    assert list(buffer.observation_space.spaces) == sorted(keys)
    assert buffer.size() == sum(lengths)
    slot = 0
    for number, episode in enumerate(episodes_of(dataset)):
        assert len(episode) == lengths[number]
        for step, item in enumerate(episode):
            is_last = step == len(episode) - 1
            following = item if is_last else episode[step + 1]
            for key, name in keys.items():
                for found, source in ((buffer.observations, item), (buffer.next_observations, following)):
                    is_image = features[name]["dtype"] == "image"
                    expected = images_first(source[name]) if is_image else source[name].numpy()
                    np.testing.assert_array_equal(found[key][slot, 0].reshape(expected.shape), expected)
            np.testing.assert_array_equal(buffer.actions[slot, 0], item["action"].numpy())
            assert buffer.rewards[slot, 0] == (item["next.reward"].item() if with_rewards else 0)
            assert buffer.dones[slot, 0] == is_last
            assert buffer.timeouts[slot, 0] == (is_last and not (with_rewards and number % 2 == 0))
            slot += 1
    buffer.close()


def test_videos_that_lerobot_wrote(tmp_path: Path) -> None:
    names = ["height", "width", "channels"]
    features: dict[str, Any] = {
        "observation.images.top": {"dtype": "video", "shape": (64, 80, 3), "names": names},
        "observation.images.wrist": {"dtype": "video", "shape": (80, 64, 3), "names": names},
        "action": {"dtype": "float32", "shape": (2,), "names": None},
    }
    dataset = LeRobotDataset.create("test/videos", 20, features, root=tmp_path / "videos")
    rng, recorded = np.random.default_rng(0), []
    for length in (5, 1, 30):
        for step in range(length):
            # Encoding has to leave enough of a picture to tell it from all others.
            shades = rng.integers(0, 256, (2, 4, 5, 3), dtype=np.uint8).repeat(16, axis=1).repeat(16, axis=2)
            recorded.append([shades[0], shades[1].transpose(1, 0, 2)])
            top, wrist = recorded[-1]
            frame = {"observation.images.top": top, "observation.images.wrist": wrist}
            dataset.add_frame({**frame, "action": np.full(2, step, dtype=np.float32), "task": "look"})
        dataset.save_episode()
    dataset.finalize()
    buffer = CompressedDictReplayBuffer.from_lerobot(tmp_path / "videos", "cpu")
    for column, key in enumerate(("top", "wrist")):
        found = buffer.observations[key][:, 0].astype(int)
        expected = np.stack([pictures[column].transpose(2, 0, 1) for pictures in recorded]).astype(int)
        for index, picture in enumerate(found):
            errors = np.abs(picture - expected).mean(axis=(1, 2, 3))
            assert errors.argmin() == index
            assert errors[index] < 12


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join([WITHOUT_CUDA, *blocks]))
    subprocess.run([sys.executable, "page.py"], cwd=tmp_path, check=True, timeout=300)
