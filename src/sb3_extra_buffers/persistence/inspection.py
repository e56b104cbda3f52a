"""What is in a saved buffer: a report for people, and a sheet of its frames."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.preprocessing import get_obs_shape

from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.persistence.container import Container
from sb3_extra_buffers.persistence.description import arguments_of, as_corrupt
from sb3_extra_buffers.persistence.files import bar, state_file
from sb3_extra_buffers.persistence.manifest import VERSION, StoredArray
from sb3_extra_buffers.storage.usage import readable

_GAP = 2
_LARGEST_CHANNELS = 4


@dataclass(frozen=True)
class FileReport:
    """What a file says of itself. Printed, it is a page."""

    path: Path
    class_name: str
    library: str
    """The version of the library that wrote it."""
    format_version: int
    saves: int
    """How many times it has been saved to since it was last written as a whole."""
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    n_envs: int
    capacity: int
    """Transitions that the buffer can hold, and"""
    transitions: int
    """that it holds."""
    methods: dict[str, str]
    """How observations are compressed, by key; the key is empty where the space is not a Dict."""
    arrays: dict[str, StoredArray]
    file_bytes: int
    stored_bytes: int
    """What of them is up to date."""
    raw_bytes: int
    """What the same transitions take in SB3's buffer."""
    damaged: list[str] | None
    """Arrays that do not agree with their checksums; ``None`` if that was not looked at."""

    @property
    def ratio(self) -> float:
        """How many times smaller than SB3's buffer."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else 1.0

    def __str__(self) -> str:
        methods = ", ".join(f"{key}: {method}" if key else method for key, method in self.methods.items())
        checksums = "not compared" if self.damaged is None else "all right"
        if self.damaged:
            checksums = f"WRONG for {', '.join(self.damaged)}"
        rows = [
            ("file", str(self.path)),
            ("class", self.class_name),
            ("written by", f"sb3-extra-buffers {self.library}, format version {self.format_version}"),
            ("observations", str(self.observation_space)),
            ("actions", str(self.action_space)),
            ("transitions", f"{self.transitions:,} of {self.capacity:,}, from {self.n_envs} environments"),
            ("method", methods),
            ("size", f"{readable(self.file_bytes)}, of which {readable(self.stored_bytes)} are up to date"),
            ("SB3 would take", f"{readable(self.raw_bytes)}, {self.ratio:.1f} times as much"),
            ("checksums", checksums),
        ]
        width = max(map(len, self.arrays), default=0)
        arrays = [
            f"  {name:<{width}}  {array.dtype!s:>8}  {readable(array.stored_bytes):>10}  {array.shape}"
            for name, array in self.arrays.items()
        ]
        return "\n".join([*(f"{name:<16}{value}" for name, value in rows), "arrays", *arrays])


def inspect_file(path: str | Path, verify: bool = True, progress: bool | None = None) -> FileReport:
    """Look into a file, or the folder of a buffer on disk, without loading it.

    :param verify: Compare all checksums, which reads the whole file.
    """
    path = Path(path)
    with Container.open(state_file(path)) as file:
        arguments = arguments_of(file)
        damaged = _verified(file, progress) if verify else None
        with as_corrupt(path):
            return _report(path, file, arguments, file.meta["state"], damaged)


def _verified(file: Container, progress: bool | None) -> list[str]:
    with bar(f"checking {file.path.name}", sum(array.nbytes for array in file.arrays.values()), progress) as update:
        return file.verify(update)


def _report(
    path: Path, file: Container, arguments: dict[str, Any], state: dict[str, Any], damaged: list[str] | None
) -> FileReport:
    n_envs, rewards = arguments["n_envs"], file.arrays["fields/rewards"]
    n_slots = math.prod(rewards.shape) // n_envs
    size = n_slots if state["full"] else state["pos"]
    space = arguments["observation_space"]
    parts: list[Any] = list(space.spaces.values()) if isinstance(space, spaces.Dict) else [space]
    observation = sum(math.prod(get_obs_shape(part)) * part.dtype.itemsize for part in parts)
    is_replay = "Rollout" not in file.meta["class"]
    columns = 2 if is_replay and not arguments["optimize_memory_usage"] else 1
    fields = sum(array.nbytes for name, array in file.arrays.items() if name.startswith("fields/"))
    mapped = sum(map(_mapped_bytes, state["stores"].values())) if path.is_dir() else 0
    return FileReport(
        path=path,
        class_name=file.meta["class"],
        library=file.meta["library"],
        format_version=VERSION,
        saves=file.generation,
        observation_space=arguments["observation_space"],
        action_space=arguments["action_space"],
        n_envs=n_envs,
        capacity=n_slots * n_envs,
        transitions=size * n_envs,
        methods={key: _method(store) for key, store in state["stores"].items()},
        arrays=file.arrays,
        file_bytes=file.path.stat().st_size + mapped,
        stored_bytes=file.stored_bytes + mapped,
        raw_bytes=size * n_envs * observation * columns + fields * size // n_slots,
        damaged=damaged,
    )


def _mapped_bytes(store: dict[str, Any]) -> int:
    """What a buffer on disk has in a file beside its state."""
    return sum(end - start for start, end in store["frames"]["arena"]["extents"])


def _method(store: dict[str, Any]) -> str:
    if "method" not in store:
        return "none"
    stack = store["layout"]["stack"]
    return f"{store['method']}, {stack} frames each" if stack > 1 else str(store["method"])


def contact_sheet(path: str | Path, png: str | Path, count: int = 40, key: str | None = None) -> None:
    """Write the newest frames of some observations, from the oldest to the newest, into a PNG image.

    :param key: Which observations of a Dict space; by default the first that are images.
    """
    image = require("PIL.Image", "A contact sheet", "video")
    buffer: Any = BaseCompressedBuffer.load(path, "cpu", mmap=True)
    chosen = _image_key(buffer, key)
    n_slots, n_envs = buffer.size(), buffer.n_envs
    count = min(count, n_slots * n_envs)
    if not count:
        raise ConfigurationError(f"{path} is empty: there are no frames to show.")
    store = buffer._stores[chosen]
    oldest = buffer.pos if buffer.full else 0
    places = np.linspace(0, n_slots * n_envs - 1, count).astype(np.int64)
    slots = (oldest + places // n_envs) % buffer.buffer_size
    (observations,) = store.read([(0, slots)], places % n_envs)
    stack = store.layout.stack if hasattr(store, "layout") else 1
    frames = _as_images(observations, stack)
    image.fromarray(_tiled(frames)).save(png)


def _image_key(buffer: Any, key: str | None) -> str:
    images = [name for name, store in buffer._stores.items() if len(store.shape) in (2, 3) and store.dtype == np.uint8]
    if key is not None and key not in images:
        raise ConfigurationError(f"There are no images of key {key!r}. Keys with images: {images}.")
    if not images:
        raise ConfigurationError("The observations of this buffer are not images, so there is nothing to show.")
    return images[0] if key is None else key


def _as_images(observations: npt.NDArray[Any], stack: int) -> npt.NDArray[np.uint8]:
    """The newest frames, as RGB."""
    images = np.clip(observations, 0, 255).astype(np.uint8)
    if images.ndim == 3:
        images = images[..., None]
    if images.shape[1] < min(images.shape[2:]) or images.shape[1] == stack:
        images = images.transpose(0, 2, 3, 1)
    channels = images.shape[-1] // stack if images.shape[-1] % stack == 0 else images.shape[-1]
    images = images[..., -channels:]
    return images[..., :3] if images.shape[-1] in (3, _LARGEST_CHANNELS) else np.repeat(images[..., -1:], 3, axis=-1)


def _tiled(frames: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Row by row on a page that is about as high as wide."""
    n, height, width = frames.shape[:3]
    columns = max(1, round(math.sqrt(n * height / width)))
    rows = -(-n // columns)
    sheet = np.full((rows * (height + _GAP), columns * (width + _GAP), 3), 64, dtype=np.uint8)
    for number, frame in enumerate(frames):
        top, left = number // columns * (height + _GAP), number % columns * (width + _GAP)
        sheet[top : top + height, left : left + width] = frame
    return sheet[:-_GAP, :-_GAP]
