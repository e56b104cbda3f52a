"""Recordings on disk.

A file is a ZIP archive of arrays, as :func:`numpy.savez_compressed` writes them, oldest step first: ``rewards``,
``actions``, ``features`` if there are any, and chunks of frames, ``frames_00000`` and so on. In a chunk, each frame but
the first is XORed with the one before it, so that unchanged pixels become zeros, which compress best. The format does
not depend on the compression method of the buffer, nor on an optional package. ``meta.json`` has the settings.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError, ExtraBuffersError
from sb3_extra_buffers.persistence.disk import replacing

if TYPE_CHECKING:
    from sb3_extra_buffers.recording.record_buffer import RecordBuffer

Buffer = TypeVar("Buffer", bound="RecordBuffer")

_VERSION = 1
_FRAMES_PER_CHUNK = 64
_LEVEL = 1
"""Compression level of Deflate."""


def save(buffer: RecordBuffer, path: Path) -> None:
    """Write ``buffer`` to ``path``. An existing file is replaced once everything is written."""
    slots = buffer.slots
    meta = {
        "version": _VERSION,
        "res": buffer.res,
        "ch_num": buffer.ch_num,
        "size": buffer.max_size,
        "frame_dtype": buffer.dtypes[0].str,
        "has_frames": buffer.has_frames,
        "has_features": buffer.features is not None,
    }
    with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as archive:
        archive.writestr("meta.json", json.dumps(meta))
        _write(archive, "rewards", buffer.rewards[slots])
        _write(archive, "actions", buffer.actions[slots])
        if buffer.features is not None:
            _write(archive, "features", buffer.features[slots])
        for number, start in enumerate(range(0, len(slots) if buffer.has_frames else 0, _FRAMES_PER_CHUNK)):
            frames = buffer.frames[slots[start : start + _FRAMES_PER_CHUNK]]
            bits = _bits(frames)
            bits[1:] ^= bits[:-1].copy()
            _write(archive, f"frames_{number:05}", frames)


def load(buffer_class: type[Buffer], path: Path, size: int | None, **kwargs: Any) -> Buffer:
    """Create a buffer with the steps that :func:`save` wrote."""
    try:
        with zipfile.ZipFile(path) as archive:
            meta = json.loads(archive.read("meta.json"))
            if meta["version"] != _VERSION:
                raise ConfigurationError(
                    f"{path} has version {meta['version']} of the file format, but only {_VERSION} can be read. "
                    "Upgrade sb3-extra-buffers."
                )
            rewards, actions = _read(archive, "rewards"), _read(archive, "actions")
            features: Any = _read(archive, "features") if meta["has_features"] else [None] * len(rewards)
            feature_dtypes = [dtype for dtype, _ in features.dtype.fields.values()] if meta["has_features"] else []
            buffer = buffer_class(
                tuple(meta["res"]),
                meta["ch_num"],
                size or meta["size"],
                [np.dtype(meta["frame_dtype"]), rewards.dtype, *feature_dtypes],
                action_shape=actions.shape[1:],
                action_dtype=actions.dtype,
                **kwargs,
            )
            frames: Iterator[Any] = _frames(archive)
            if not buffer.has_frames:
                frames = iter([None] * len(rewards))
            elif not meta["has_frames"]:
                raise ConfigurationError(f"{path} has no frames: load it with FramelessRecordBuffer.")
            for frame, reward, action, feature in zip(frames, rewards, actions, features, strict=True):
                buffer.add(frame, reward, action, feature)
    except ExtraBuffersError:
        raise
    except (zipfile.BadZipFile, zlib.error, RuntimeError, KeyError, EOFError, TypeError, ValueError) as error:
        raise CorruptDataError(f"{path} is not a complete recording: {error}") from error
    return buffer


def _frames(archive: zipfile.ZipFile) -> Iterator[npt.NDArray[Any]]:
    for name in sorted(name for name in archive.namelist() if name.startswith("frames_")):
        frames = _read(archive, name.removesuffix(".npy"))
        np.bitwise_xor.accumulate(_bits(frames), axis=0, out=_bits(frames))
        yield from frames


def _bits(frames: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The bytes of the frames, as a view with one row per frame."""
    return frames.reshape(len(frames), -1).view(np.uint8)


def _write(archive: zipfile.ZipFile, name: str, array: npt.NDArray[Any]) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, array, allow_pickle=False)


def _read(archive: zipfile.ZipFile, name: str) -> npt.NDArray[Any]:
    with archive.open(f"{name}.npy") as member:
        array: npt.NDArray[Any] = np.lib.format.read_array(member, allow_pickle=False)
    return array
