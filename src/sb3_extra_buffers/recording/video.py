"""Write frames to a video."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.errors import ConfigurationError

Picture = npt.NDArray[np.uint8]
"""An RGB image: height × width × 3."""

_Format = tuple[str, str, list[str]]
"""ffmpeg's codec, pixel format and options."""
_H264: _Format = ("libx264", "yuv420p", ["-crf", "18", "-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2"])  # needs even sides
_PALETTES = "split[a][b];[a]palettegen=stats_mode=single:reserve_transparent=0[p];[b][p]paletteuse=new=1:dither=none"
_LOSSY: dict[str, _Format] = {".mp4": _H264, ".mkv": _H264, ".gif": ("gif", "pal8", ["-filter_complex", _PALETTES])}
_LOSSLESS: dict[str, _Format] = {
    ".mp4": ("libx264rgb", "rgb24", ["-qp", "0", "-preset", "fast"]),
    ".mkv": ("ffv1", "bgr0", []),
}


def to_pictures(frames: Iterable[npt.NDArray[Any]]) -> Iterator[Picture]:
    """Convert frames, channels first, to pictures. Floats are shown from 0 to 1, all other numbers from 0 to 255."""
    for frame in frames:
        if frame.shape[0] not in (1, 3):
            raise ConfigurationError(
                f"A frame with {frame.shape[0]} channels cannot be shown: only 1 (grey) or 3 (RGB) channels can."
            )
        if frame.dtype.kind in "fb":
            frame = np.nan_to_num(frame.astype(np.float64)).clip(0, 1) * 255
        if frame.dtype != np.uint8:
            frame = np.rint(frame).clip(0, 255).astype(np.uint8)
        pixels = frame.transpose(1, 2, 0)
        yield np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))


def save_video(pictures: Iterator[Picture], path: Path, fps: float, lossless: bool) -> None:
    formats = _LOSSLESS if lossless else _LOSSY
    if path.suffix not in formats:
        kind = "A lossless video" if lossless else "A video"
        raise ConfigurationError(f"{kind} file must end with {' or '.join(formats)}, but this is {path}.")
    ffmpeg = require("imageio_ffmpeg", "save_video()", "video")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"No such file or directory: {path.parent}")
    codec, pixel_format, options = formats[path.suffix]
    first = next(pictures)
    height, width = first.shape[:2]
    path.unlink(missing_ok=True)
    writer = ffmpeg.write_frames(
        f"file:{path}",  # a colon in the path would otherwise name a protocol
        (width, height),
        fps=fps,
        codec=codec,
        pix_fmt_out=pixel_format,
        quality=None,
        macro_block_size=1,
        ffmpeg_log_level="error",
        output_params=options,
    )
    writer.send(None)
    count = 0
    for picture in itertools.chain([first], pictures):
        writer.send(picture)
        count += 1
    writer.close()
    # ffmpeg reports errors on the terminal only. The file tells whether it succeeded.
    written = ffmpeg.count_frames_and_secs(str(path))[0] if path.exists() else 0
    if written != count:
        raise OSError(f"ffmpeg wrote {written} of {count} frames to {path}. What it printed above may say why.")
