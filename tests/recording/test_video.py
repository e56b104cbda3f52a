"""Videos, read back."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.errors import ConfigurationError, MissingPackageError, ObservationError
from sb3_extra_buffers.recording import RecordBuffer

imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
PIL = pytest.importorskip("PIL.Image")

N = 12


def recorded(ch_num: int, dtype: Any = np.uint8, res: tuple[int, int] = (33, 46)) -> tuple[RecordBuffer, np.ndarray]:
    """Noise, which no lossy codec keeps, in sides that are not even; and the pictures that should be seen."""
    rng = np.random.default_rng(0)
    buffer = RecordBuffer(res, ch_num, size=N, dtypes=[dtype, np.float32])
    pictures = rng.integers(0, 256, (N + 5, *res, ch_num), dtype=np.uint8)
    for picture in pictures:
        frame = picture if dtype is np.uint8 else (picture / 255).astype(dtype)
        buffer.add(frame, 0, 0)
    return buffer, np.broadcast_to(pictures[-N:], (N, *res, 3)) if ch_num in (1, 3) else pictures


def read_video(path: Path) -> np.ndarray:
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", path, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    output = subprocess.run(command, capture_output=True, check=True)
    size = re.search(rb"Video: .*?, (\d+)x(\d+)", output.stderr)
    assert size is not None
    return np.frombuffer(output.stdout, np.uint8).reshape(-1, int(size[2]), int(size[1]), 3)


@pytest.mark.parametrize("ch_num", [1, 3])
@pytest.mark.parametrize("suffix", [".mkv", ".mp4"])
def test_a_lossless_video_has_every_pixel_of_every_frame(tmp_path: Path, suffix: str, ch_num: int) -> None:
    buffer, pictures = recorded(ch_num)
    buffer.save_video(tmp_path / f"video{suffix}", fps=25, lossless=True)
    np.testing.assert_array_equal(read_video(tmp_path / f"video{suffix}"), pictures)


def test_a_video_for_every_player(tmp_path: Path) -> None:
    buffer = RecordBuffer((33, 46), size=N)
    for step in range(N):
        buffer.add(np.full((33, 46, 3), 20 * step, np.uint8), 0, 0)
    buffer.save_video(tmp_path / "video.mp4")
    pictures = read_video(tmp_path / "video.mp4")
    assert pictures.shape == (N, 34, 46, 3)
    assert np.abs(pictures[:, :32, :].mean(axis=(1, 2, 3)) - 20 * np.arange(N)).max() < 6


def test_floats_are_shown_from_zero_to_one(tmp_path: Path) -> None:
    buffer, pictures = recorded(1, np.float32)
    buffer.save_video(tmp_path / "video.mkv", lossless=True)
    np.testing.assert_array_equal(read_video(tmp_path / "video.mkv"), pictures)


def test_a_gif_has_its_own_colours_in_every_frame(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    buffer = RecordBuffer((33, 46), size=N)
    colours = rng.integers(0, 256, (N, 256, 3), dtype=np.uint8)
    pictures = np.stack([palette[rng.integers(0, 256, (33, 46))] for palette in colours])
    for picture in pictures:
        buffer.add(picture, 0, 0)
    buffer.save_video(tmp_path / "animation.gif", fps=10)
    with PIL.open(tmp_path / "animation.gif") as animation:
        assert (animation.n_frames, animation.info["duration"], animation.info["loop"]) == (N, 100, 0)
        for number in range(N):
            animation.seek(number)
            assert np.abs(np.asarray(animation.convert("RGB")).astype(int) - pictures[number]).max() <= 1


def test_mistakes_are_errors(tmp_path: Path) -> None:
    buffer, _ = recorded(3)
    with pytest.raises(ConfigurationError, match=r"\.mp4 or \.mkv or \.gif"):
        buffer.save_video(tmp_path / "video.txt")
    with pytest.raises(OSError, match="No such file"):
        buffer.save_video(tmp_path / "missing" / "video.mp4")
    with pytest.raises(ObservationError, match="Nothing was recorded"):
        RecordBuffer().save_video(tmp_path / "video.mp4")
    with pytest.raises(ConfigurationError, match="4 channels"):
        recorded(4)[0].save_video(tmp_path / "animation.gif")
    with pytest.raises(ConfigurationError, match="A lossless video file must end with"):
        buffer.save_video(tmp_path / "animation.gif", lossless=True)


def test_the_extra_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(MissingPackageError, match=r"sb3-extra-buffers\[video\]"):
        recorded(3)[0].save_video(tmp_path / "video.mp4")
