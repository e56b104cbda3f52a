"""Frames as a video or an animation."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.errors import ConfigurationError

Picture = npt.NDArray[np.uint8]
"""Height × width × red, green, blue."""

# Codec, pixel format and options.
_GOOD = ("libx264", "yuv420p", ["-crf", "18", "-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2"])  # its sides must be even
_EXACT = {
    ".mp4": ("libx264rgb", "rgb24", ["-qp", "0", "-preset", "fast"]),
    ".mkv": ("ffv1", "bgr0", []),
}


def to_pictures(frames: Iterable[npt.NDArray[Any]]) -> Iterator[Picture]:
    """Frames, channels first, as pictures. Floats are taken to be from 0 to 1, all other numbers from 0 to 255."""
    for frame in frames:
        if frame.shape[0] not in (1, 3):
            raise ConfigurationError(
                f"A frame of {frame.shape[0]} channels cannot be shown, only one of 1 (grey) or 3 (red, green, blue)."
            )
        if frame.dtype.kind in "fb":
            frame = np.nan_to_num(frame.astype(np.float64)).clip(0, 1) * 255
        if frame.dtype != np.uint8:
            frame = np.rint(frame).clip(0, 255).astype(np.uint8)
        pixels = frame.transpose(1, 2, 0)
        yield np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))


def save_video(pictures: Iterator[Picture], path: Path, fps: float, lossless: bool) -> None:
    if path.suffix not in _EXACT:
        raise ConfigurationError(f"A video is written to a file that ends with {' or '.join(_EXACT)}, not to {path}.")
    ffmpeg = require("imageio_ffmpeg", "save_video()", "video").get_ffmpeg_exe()
    codec, pixel_format, options = _EXACT[path.suffix] if lossless else _GOOD
    first = next(pictures)
    height, width = first.shape[:2]
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps), "-i", "-"]
    target = ["-c:v", codec, "-pix_fmt", pixel_format, *options, f"file:{path}"]
    with (
        tempfile.TemporaryFile() as complaints,
        subprocess.Popen(
            [ffmpeg, "-y", "-v", "error", *source, *target],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
        ) as process,
    ):
        assert process.stdin is not None  # there is one: it was asked for
        with contextlib.suppress(BrokenPipeError):  # ffmpeg gave up, and says why
            for picture in itertools.chain([first], pictures):
                process.stdin.write(picture.tobytes())
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        if process.wait() != 0:
            complaints.seek(0)
            raise OSError(f"ffmpeg could not write {path}: {complaints.read().decode(errors='replace').strip()}")


def save_gif(pictures: Iterator[Picture], path: Path, fps: float) -> None:
    image = require("PIL.Image", "save_gif()", "video")
    images = (_with_palette(image, picture) for picture in pictures)
    first = next(images)
    first.save(path, "GIF", save_all=True, append_images=images, duration=1000 / fps, loop=0, optimize=False)


def _with_palette(image: Any, picture: Picture) -> Any:
    """A picture in at most 256 colours: its own where there are no more."""
    shades = picture.astype(np.uint32)
    numbers = shades[..., 0] << 16 | shades[..., 1] << 8 | shades[..., 2]
    colours, indices = np.unique(numbers, return_inverse=True)
    if len(colours) > 256:
        return image.fromarray(picture).quantize(256)
    indexed = image.frombytes("P", numbers.shape[::-1], indices.astype(np.uint8).tobytes())
    indexed.putpalette(np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1).astype(np.uint8).tobytes())
    return indexed
