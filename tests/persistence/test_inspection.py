"""Reports of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from sb3_extra_buffers.errors import FileFormatError
from sb3_extra_buffers.persistence.inspection import inspect_file
from tests.persistence.buffers import ALL_CLASSES, N_ENVS, SLOTS, add, make, steps_for


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
