"""Reports of files, and sheets of their frames."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.compressed import BaseCompressedBuffer
from sb3_extra_buffers.errors import ConfigurationError, FileFormatError
from sb3_extra_buffers.persistence.inspection import contact_sheet, inspect_file
from tests.persistence.buffers import ALL_CLASSES, DICT, N_ENVS, SLOTS, add, make, steps_for


def saved(path: Path, name: str, count: int = 30, **kwargs: object) -> Path:
    buffer = make(name, **kwargs)
    for number, step in enumerate(steps_for(buffer, count)):
        add(buffer, step, number)
    buffer.save(path)
    return path


@pytest.mark.parametrize("name", ALL_CLASSES)
def test_a_report_of_every_class(name: str, tmp_path: Path) -> None:
    report = inspect_file(saved(tmp_path / "buffer", name))
    assert (report.class_name, report.transitions, report.capacity) == (name, 30 * N_ENVS, SLOTS * N_ENVS)
    assert report.damaged == []
    assert str(report.path) in str(report)
    assert "all right" in str(report)
    assert all(array in str(report) for array in report.arrays)


def test_sizes(tmp_path: Path) -> None:
    path = saved(tmp_path / "buffer", "CompressedReplayBuffer", compression_method="delta", frame_stack=4)
    report = inspect_file(path)
    assert report.file_bytes == path.stat().st_size > report.stored_bytes
    # Two stacks of observations and 20 bytes for action, reward, done and timeout.
    assert report.raw_bytes == 30 * N_ENVS * (2 * 4 * 8 * 9 + 20)
    assert report.methods == {"": "delta, 4 frames each"}
    assert inspect_file(path, verify=False).damaged is None


def test_damage_is_reported(tmp_path: Path) -> None:
    path = saved(tmp_path / "buffer", "CompressedReplayBuffer", 60, compression_method="gzip")
    report = inspect_file(path)
    block = report.arrays["stores//frames/arena/bytes"].blocks[0]
    content = bytearray(path.read_bytes())
    content[block.offset] ^= 1
    path.write_bytes(content)
    assert inspect_file(path).damaged == ["stores//frames/arena/bytes"]
    assert "WRONG for stores//frames/arena/bytes" in str(inspect_file(path))


def test_the_folder_of_a_buffer_on_disk(tmp_path: Path) -> None:
    with make("CompressedReplayBuffer", storage="mmap", path=tmp_path, compression_method="gzip") as buffer:
        for step in steps_for(buffer, 60):
            buffer.add(*step)
    buffer.save(tmp_path / "file")
    report, same = inspect_file(tmp_path), inspect_file(tmp_path / "file")
    assert (report.class_name, report.path) == ("CompressedReplayBuffer", tmp_path)
    assert report.stored_bytes == pytest.approx(same.stored_bytes, rel=0.3)  # which has whole blocks


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("something else")
    with pytest.raises(FileFormatError):
        inspect_file(tmp_path / "file")


@pytest.mark.parametrize(
    ("space", "frame"),
    [
        (spaces.Box(0, 255, (4, 8, 9), np.uint8), (8, 9)),
        (spaces.Box(0, 255, (8, 9, 3), np.uint8), (8, 9)),
        (spaces.Box(0, 255, (3, 8, 9), np.uint8), (8, 9)),
        (spaces.Box(0, 255, (8, 9), np.uint8), (8, 9)),
    ],
)
def test_a_sheet_of_frames(space: spaces.Space, frame: tuple[int, int], tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    path = saved(tmp_path / "buffer", "CompressedReplayBuffer", 2 * SLOTS, space=space)
    contact_sheet(BaseCompressedBuffer.load(path, mmap=True), tmp_path / "sheet.png", count=12)
    sheet = np.asarray(image.open(tmp_path / "sheet.png"))
    assert sheet.shape == (4 * frame[0] + 3 * 2, 3 * frame[1] + 2 * 2, 3)
    buffer = make("CompressedReplayBuffer", space=space)
    for step in steps_for(buffer, 2 * SLOTS):
        buffer.add(*step)
    newest = buffer.observations[buffer.pos - 1, N_ENVS - 1].reshape(-1, 8, 9)
    if space.shape == (8, 9, 3):
        newest = newest.reshape(8, 9, 3).transpose(2, 0, 1)
    corner = sheet[-frame[0] :, -frame[1] :]
    np.testing.assert_array_equal(corner, np.repeat(newest[-1][..., None], 3, axis=-1))


def test_sheets_that_cannot_be(tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")
    with pytest.raises(ConfigurationError, match="is empty"):
        contact_sheet(make("CompressedReplayBuffer"), tmp_path / "sheet.png")
    vectors = saved(tmp_path / "b", "CompressedReplayBuffer", space=DICT["a/vector~"])
    with pytest.raises(ConfigurationError, match="are not images"):
        contact_sheet(BaseCompressedBuffer.load(vectors), tmp_path / "sheet.png")
    both = saved(tmp_path / "c", "CompressedDictReplayBuffer")
    with pytest.raises(ConfigurationError, match=r"no images of key 'x'. Keys with images: \['image'\]"):
        contact_sheet(BaseCompressedBuffer.load(both), tmp_path / "sheet.png", key="x")
    contact_sheet(BaseCompressedBuffer.load(both), tmp_path / "sheet.png")
