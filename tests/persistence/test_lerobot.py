"""Datasets of LeRobot, written here with pyarrow alone. tests/neighbours compares with LeRobot itself."""

from __future__ import annotations

import io
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.compressed import CompressedDictReplayBuffer, CompressedReplayBuffer, lerobot
from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError, FileFormatError, MissingPackageError

av = pytest.importorskip("av")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
images = pytest.importorskip("PIL.Image")

TOP, STATE, GRID = "observation.images.top", "observation.state", "observation.grid"
FEATURES: dict[str, dict[str, Any]] = {
    TOP: {"dtype": "image", "shape": [6, 5, 3]},
    STATE: {"dtype": "float32", "shape": [4]},
    GRID: {"dtype": "int16", "shape": [2, 3]},
    "action": {"dtype": "float32", "shape": [2]},
    "next.reward": {"dtype": "float32", "shape": [1]},
    "next.done": {"dtype": "bool", "shape": [1]},
    "episode_index": {"dtype": "int64", "shape": [1]},
    "index": {"dtype": "int64", "shape": [1]},
}
Frames = list[dict[str, Any]]


def frames_of(lengths: list[int], seed: int = 0) -> Frames:
    """Random frames. Every second episode ends with ``next.done``."""
    rng = np.random.default_rng(seed)
    return [
        {
            TOP: rng.integers(0, 256, (6, 5, 3), dtype=np.uint8),
            STATE: rng.normal(size=4).astype(np.float32),
            GRID: rng.integers(-9, 9, (2, 3), dtype=np.int16),
            "action": rng.normal(size=2).astype(np.float32),
            "next.reward": np.float32(rng.normal()),
            "next.done": step == length - 1 and number % 2 == 0,
            "episode_index": number,
        }
        for number, length in enumerate(lengths)
        for step in range(length)
    ]


def png(pixels: np.ndarray) -> dict[str, Any]:
    file = io.BytesIO()
    images.fromarray(pixels).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": "frame.png"}


def write(root: Path, frames: Frames, rows_per_file: int = 1000, drop: tuple[str, ...] = (), **info: Any) -> Path:
    features = {name: feature for name, feature in FEATURES.items() if name not in drop}
    if frames and "next.truncated" in frames[0]:
        features["next.truncated"] = FEATURES["next.done"]
    described = {"codebase_version": "v3.0", "fps": 30, "total_frames": len(frames), "features": features, **info}
    (root / "meta").mkdir(parents=True)
    (root / "meta/info.json").write_text(json.dumps(described))
    (root / "data/chunk-000").mkdir(parents=True)
    for number, start in enumerate(range(0, len(frames), rows_per_file)):
        rows = [{**frame, "index": start + row} for row, frame in enumerate(frames[start : start + rows_per_file])]
        table = pyarrow.table(
            {
                name: [png(row[name]) if name == TOP else np.asarray(row[name]).tolist() for row in rows]
                for name in features
            }
        )
        parquet.write_table(table, root / f"data/chunk-000/file-{number:03d}.parquet", row_group_size=7)
    return root


def check(buffer: CompressedDictReplayBuffer, frames: Frames) -> None:
    assert buffer.size() == len(frames)
    for slot, frame in enumerate(frames):
        following = frames[slot + 1] if slot + 1 < len(frames) else None
        is_last = following is None or following["episode_index"] != frame["episode_index"]
        after = frame if is_last else following
        for key, name in {"top": TOP, "state": STATE, "grid": GRID}.items():
            for found, source in ((buffer.observations, frame), (buffer.next_observations, after)):
                expected = source[name].transpose(2, 0, 1) if name == TOP else source[name]
                np.testing.assert_array_equal(found[key][slot, 0], expected)
        np.testing.assert_array_equal(buffer.actions[slot, 0], frame["action"])
        assert buffer.rewards[slot, 0] == frame["next.reward"]
        assert buffer.dones[slot, 0] == is_last
        assert buffer.timeouts[slot, 0] == (is_last and not frame["next.done"])


@pytest.mark.parametrize("rows_per_file", [1, 10, 1000])
def test_every_frame_is_a_transition(rows_per_file: int, tmp_path: Path) -> None:
    frames = frames_of([5, 1, 1, 70, 9])
    root = write(tmp_path / "dataset", frames, rows_per_file)
    buffer = CompressedDictReplayBuffer.from_lerobot(root, "cpu")
    assert buffer.observation_space == spaces.Dict(
        top=spaces.Box(0, 255, (3, 6, 5), np.uint8),
        state=spaces.Box(-np.inf, np.inf, (4,), np.float32),
        grid=spaces.Box(-(2**15), 2**15 - 1, (2, 3), np.int16),
    )
    assert buffer.action_space == spaces.Box(-np.inf, np.inf, (2,), np.float32)
    check(buffer, frames)


def write_videos(root: Path, frames: Frames, episodes_per_file: int, gap: int = 0) -> None:
    """Move the images of a dataset to videos without loss, as LeRobot lays them out.

    :param gap: Frames between the episodes that belong to none, as where episodes were deleted.
    """
    info = json.loads((root / "meta/info.json").read_text())
    info["features"][TOP]["dtype"] = "video"
    (root / "meta/info.json").write_text(json.dumps(info))
    (root / f"videos/{TOP}/chunk-000").mkdir(parents=True)
    (root / "meta/episodes/chunk-000").mkdir(parents=True)
    episodes = [list(episode) for _, episode in itertools.groupby(frames, lambda frame: frame["episode_index"])]
    rows = []
    for number, first in enumerate(range(0, len(episodes), episodes_per_file)):
        n_frames, pictures = 0, []
        for episode in episodes[first : first + episodes_per_file]:
            rows.append([len(episode), 0, number, n_frames / info["fps"]])
            pictures += [frame[TOP] for frame in episode] + [episode[0][TOP][::-1]] * gap
            n_frames = len(pictures)
        with av.open(str(root / f"videos/{TOP}/chunk-000/file-{number:03d}.mp4"), "w") as file:
            stream = file.add_stream("libx264rgb", rate=info["fps"], options={"qp": "0", "g": "12"})
            stream.height, stream.width, stream.pix_fmt = *pictures[0].shape[:2], "rgb24"
            for pixels in pictures:
                file.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), "rgb24")))
            file.mux(stream.encode())
    names = ["length", *(f"videos/{TOP}/{what}" for what in ("chunk_index", "file_index", "from_timestamp"))]
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    parquet.write_table(pyarrow.table(columns), root / "meta/episodes/chunk-000/file-000.parquet")


@pytest.mark.parametrize("fps", [10, 30])
@pytest.mark.parametrize("gap", [0, 1, 7])
@pytest.mark.parametrize("episodes_per_file", [1, 2, 9])
def test_every_frame_of_a_video_is_where_it_belongs(episodes_per_file: int, gap: int, fps: int, tmp_path: Path) -> None:
    frames = frames_of([5, 1, 1, 70, 9])
    root = write(tmp_path / "dataset", frames, fps=fps)
    write_videos(root, frames, episodes_per_file, gap)
    check(CompressedDictReplayBuffer.from_lerobot(root, "cpu"), frames)


def test_videos_that_are_not_complete(tmp_path: Path) -> None:
    frames = frames_of([5, 20])
    root = write(tmp_path / "dataset", frames)
    write_videos(root, [*frames[:5], *frames[5:-2]], episodes_per_file=1)
    episodes = root / "meta/episodes/chunk-000/file-000.parquet"
    table = parquet.read_table(episodes)
    parquet.write_table(table.set_column(0, "length", pyarrow.array([5, 20])), episodes)
    with pytest.raises(CorruptDataError, match=r"file-001\.mp4 has 18 frames of an episode of 20.*Download it again"):
        CompressedDictReplayBuffer.from_lerobot(root, "cpu")
    (root / f"videos/{TOP}/chunk-000/file-001.mp4").unlink()
    with pytest.raises(CorruptDataError, match=r"file-001\.mp4 is missing.*Download it again"):
        CompressedDictReplayBuffer.from_lerobot(root, "cpu")


def test_an_import_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = frames_of([20, 30])
    root = write(tmp_path / "dataset", frames)
    options = {"storage": "mmap", "path": tmp_path / "buffer"}
    n_left = 33

    class Interrupted(CompressedDictReplayBuffer):
        def add(self, *args: Any) -> None:
            nonlocal n_left
            if not n_left:
                self.close()
                raise InterruptedError
            n_left -= 1
            super().add(*args)

    Interrupted.__name__ = "CompressedDictReplayBuffer"
    with pytest.raises(InterruptedError):
        Interrupted.from_lerobot(root, "cpu", **options)
    for _ in range(2):
        with CompressedDictReplayBuffer.from_lerobot(root, "cpu", **options) as buffer:
            check(buffer, frames)
    other = write(tmp_path / "other", frames_of([20, 30], seed=1))
    with pytest.raises(ConfigurationError, match="other data"):
        CompressedDictReplayBuffer.from_lerobot(other, "cpu", **options)


def test_one_column_and_spaces_of_the_user(tmp_path: Path) -> None:
    frames = frames_of([12])
    for number, frame in enumerate(frames):
        frame["action"] = np.array([number % 3])
    root = write(tmp_path / "dataset", frames, features={**FEATURES, "action": {"dtype": "int64", "shape": [1]}})
    space, actions = spaces.Box(-9, 9, (4,), np.float32), spaces.Discrete(3)
    buffer = CompressedReplayBuffer.from_lerobot(
        root, "cpu", 20, columns=[STATE], observation_space=space, action_space=actions
    )
    assert buffer.buffer_size == 20
    assert (buffer.observation_space, buffer.action_space) == (space, actions)
    np.testing.assert_array_equal(buffer.observations[:12, 0], [frame[STATE] for frame in frames])
    np.testing.assert_array_equal(buffer.actions[:12, 0, 0], np.arange(12) % 3)


def test_demonstrations_have_no_rewards(tmp_path: Path) -> None:
    root = write(tmp_path / "dataset", frames_of([4, 3]), drop=("next.reward", "next.done"))
    buffer = CompressedDictReplayBuffer.from_lerobot(root, "cpu")
    assert not buffer.rewards.any()
    np.testing.assert_array_equal(buffer.dones[:, 0], [0, 0, 0, 1, 0, 0, 1])
    np.testing.assert_array_equal(buffer.timeouts[:, 0], buffer.dones[:, 0])


def test_truncations(tmp_path: Path) -> None:
    """An episode ends at a truncation, too. One that ends with neither flag is cut off."""
    done = [0, 0, 1, 0, 0, 1, 0, 0]
    truncated = [0, 0, 1, 0, 0, 0, 0, 0]
    frames = frames_of([3, 3, 2])
    for frame, one, other in zip(frames, done, truncated, strict=True):
        frame |= {"next.done": bool(one), "next.truncated": bool(other)}
    buffer = CompressedDictReplayBuffer.from_lerobot(write(tmp_path / "dataset", frames), "cpu")
    np.testing.assert_array_equal(buffer.dones[:, 0], [0, 0, 1, 0, 0, 1, 0, 1])
    np.testing.assert_array_equal(buffer.timeouts[:, 0], [0, 0, 1, 0, 0, 0, 0, 1])


def test_few_frames_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    decode = lerobot._decode_image
    monkeypatch.setattr(lerobot, "_decode_image", lambda image: decoded.append(0) or decode(image))
    root = write(tmp_path / "dataset", frames_of([300]))
    folder = lerobot.LeRobotFolder(root, None, as_dict=True)
    decoded.clear()
    for number, _ in enumerate(folder.steps()):
        assert len(decoded) <= number + 1 + lerobot._ROWS_AT_ONCE


def described(**changes: Any) -> dict[str, Any]:
    return {"features": {**FEATURES, **changes}}


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ({"codebase_version": "v2.1"}, {}, FileFormatError, r"version v2\.1.*convert_dataset_v21_to_v30"),
        ({}, {"columns": ["observation.wrist"]}, ConfigurationError, r"no column 'observation\.wrist'.*It has obs"),
        ({}, {"columns": "observation.wrist"}, ConfigurationError, r"no column 'observation\.wrist'"),
        ({"drop": (TOP, STATE, GRID)}, {}, ConfigurationError, "no column whose name begins with 'observation'"),
        ({"drop": ("action",)}, {}, ConfigurationError, "no column 'action'"),
        (
            described(**{TOP: {"dtype": "video", "shape": [6, 5, 1], "info": {"is_depth_map": True}}}),
            {},
            ConfigurationError,
            "is a video of depths",
        ),
        (described(**{STATE: {"dtype": "string", "shape": [1]}}), {}, ConfigurationError, "holds text"),
        (described(**{"observation.top": FEATURES[TOP]}), {}, ConfigurationError, "the same key"),
        (described(**{"observation.more": FEATURES[STATE]}), {}, ConfigurationError, r"file-000.*no column obs.*more"),
        ({"total_frames": 9}, {}, CorruptDataError, "have 8 frames.*promises 9"),
    ],
)
def test_datasets_that_cannot_be_imported(
    arguments: Any, options: Any, error: Any, message: str, tmp_path: Path
) -> None:
    root = write(tmp_path / "dataset", frames_of([8]), **arguments)
    with pytest.raises(error, match=message):
        CompressedDictReplayBuffer.from_lerobot(root, "cpu", **options)


def test_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"user/name is not the folder.*LeRobotDataset"):
        CompressedDictReplayBuffer.from_lerobot("user/name", "cpu")
    with pytest.raises(ConfigurationError, match="has no frames"):
        CompressedDictReplayBuffer.from_lerobot(write(tmp_path / "dataset", []), "cpu")


def test_several_columns_need_a_dict(tmp_path: Path) -> None:
    root = write(tmp_path / "dataset", frames_of([8]))
    with pytest.raises(ConfigurationError, match=r"has 3 columns: .*CompressedDictReplayBuffer"):
        CompressedReplayBuffer.from_lerobot(root, "cpu")


def test_a_file_is_missing(tmp_path: Path) -> None:
    root = write(tmp_path / "dataset", frames_of([30]), rows_per_file=10)
    (root / "data/chunk-000/file-001.parquet").unlink()
    with pytest.raises(CorruptDataError, match=r"row 0 of .*file-002\.parquet follows frame 9.*Download it again"):
        CompressedDictReplayBuffer.from_lerobot(root, "cpu")


def test_what_lerobot_cannot_store(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = CompressedReplayBuffer(9, spaces.Box(0, 255, (4, 8, 9), np.uint8), spaces.Discrete(2), "cpu")
    monkeypatch.setitem(sys.modules, "lerobot", None)
    with pytest.raises(MissingPackageError, match=r"pip install lerobot$"):
        buffer.to_lerobot("user/name", 30)
    for name in ("lerobot", "lerobot.datasets", "lerobot.datasets.lerobot_dataset"):
        monkeypatch.setitem(sys.modules, name, json)
    with pytest.raises(ConfigurationError, match="three channels of uint8"):
        buffer.to_lerobot("user/name", 30)
