"""Read LeRobot datasets (format v3.0) with pyarrow, Pillow and PyAV, and write them with LeRobot's own class.

LeRobot calls a time step a *frame*: an observation, the action taken there, and the reward and flags that followed.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.compressed.rows import SINGLE, map_parts
from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError, FileFormatError

if TYPE_CHECKING:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    from sb3_extra_buffers.compressed.conversion import Episode

_VERSION = "v3."
_ROWS_AT_ONCE = 16
"""How many frames are in memory at a time. Each may have several large images."""
_ACTION, _REWARD, _DONE, _TRUNCATED = "action", "next.reward", "next.done", "next.truncated"
_EPISODE, _INDEX = "episode_index", "index"
_NO_FRAME: dict[str, Any] = {}


class LeRobotFolder:
    """A dataset of LeRobot on the local disk. Only a few frames at a time are in memory.

    :param source: The folder, or a ``LeRobotDataset``.
    :param columns: The columns of observations; by default, all whose names begin with ``observation``.
    :param as_dict: Whether observations are dicts, even if they have one column only.
    """

    def __init__(self, source: Any, columns: Sequence[str] | None, as_dict: bool) -> None:
        self.root = Path(source if isinstance(source, str | PathLike) else source.root).expanduser()
        try:
            info = json.loads((self.root / "meta/info.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigurationError(
                f"{self.root} is not the folder of a LeRobot dataset: it has no meta/info.json. To use a dataset of "
                'the Hugging Face Hub, download it first and pass its folder: LeRobotDataset("user/name").root.'
            ) from None
        version = str(info.get("codebase_version"))
        if not version.startswith(_VERSION):
            raise FileFormatError(
                f"{self.root} has version {version} of LeRobot's format. Only {_VERSION}x can be read; LeRobot's "
                "script convert_dataset_v21_to_v30 converts datasets of v2.1."
            )
        self.features: dict[str, dict[str, Any]] = info["features"]
        self.total_frames = int(info["total_frames"])
        self.fps = float(info["fps"])
        self.columns = self._columns_by_key(columns, as_dict)
        first = next(self._frames(), None)
        if first is None:
            raise ConfigurationError(f"The LeRobot dataset {self.root} has no frames.")
        parts = map_parts(lambda value: _space(value.dtype, value.shape), first["observation"])
        self.observation_space = spaces.Dict(parts) if as_dict else parts
        self.action_space = _space(first[_ACTION].dtype, first[_ACTION].shape)

    def _columns_by_key(self, columns: Sequence[str] | None, as_dict: bool) -> dict[str, str]:
        """Map each key of an observation to its column."""
        found = [name for name in self.features if name.partition(".")[0] == "observation"]
        chosen = found if columns is None else [columns] if isinstance(columns, str) else list(columns)
        if not chosen:
            raise ConfigurationError(
                f"The LeRobot dataset {self.root} has no column whose name begins with 'observation'. Choose columns: "
                f"it has {', '.join(self.features)}."
            )
        for name in (*chosen, _ACTION):
            feature = self.features.get(name)
            if feature is None:
                raise ConfigurationError(
                    f"The LeRobot dataset {self.root} has no column {name!r}. It has {', '.join(self.features)}."
                )
            details = {**(feature.get("video_info") or {}), **(feature.get("info") or {})}
            if feature["dtype"] == "video" and (details.get("is_depth_map") or details.get("video.is_depth_map")):
                raise ConfigurationError(
                    f"{name!r} of the LeRobot dataset {self.root} is a video of depths, whose values only LeRobot can "
                    "restore. Choose other columns."
                )
            if feature["dtype"] == "string":
                raise ConfigurationError(
                    f"{name!r} of the LeRobot dataset {self.root} holds text. Choose other columns."
                )
        if not as_dict and len(chosen) != 1:
            raise ConfigurationError(
                f"An observation of the LeRobot dataset {self.root} has {len(chosen)} columns: {', '.join(chosen)}. "
                "Use CompressedDictReplayBuffer, or choose one of them: columns=[...]."
            )
        # SB3 uses keys as names of torch modules, which must not contain dots.
        keys = {_key(name): name for name in chosen}
        if len(keys) < len(chosen):
            raise ConfigurationError(
                f"Two of the columns {', '.join(chosen)} would have the same key. Choose one of them."
            )
        return keys if as_dict else {SINGLE: chosen[0]}

    def steps(self) -> Iterator[tuple[Any, ...]]:
        """Yield all steps as arguments of ``add()``. In the last step of an episode, both observations are the same."""
        for frame, following in pairwise(chain(self._frames(), [_NO_FRAME])):
            is_last = following.get(_EPISODE) != frame[_EPISODE]
            done = bool(frame.get(_DONE, False))
            truncated = bool(frame.get(_TRUNCATED, False)) or (is_last and not done)
            obs = map_parts(lambda value: value[None], frame["observation"])
            yield (
                obs,
                obs if is_last else map_parts(lambda value: value[None], following["observation"]),
                frame[_ACTION][None],
                np.asarray(frame.get(_REWARD, 0.0), dtype=np.float32).reshape(1),
                np.array([done or truncated or is_last]),
                [{"TimeLimit.truncated": truncated}],
            )

    def _frames(self) -> Iterator[dict[str, Any]]:
        """Yield the frames of all files: dicts with an item "observation" and the other columns that a step needs."""
        parquet = require("pyarrow.parquet", "A LeRobot dataset", "lerobot")
        further = [_ACTION, _EPISODE, _INDEX, *(name for name in (_REWARD, _DONE, _TRUNCATED) if name in self.features)]
        videos = {name: self._video(name) for name in self.columns.values() if self.features[name]["dtype"] == "video"}
        names = [*(name for name in self.columns.values() if name not in videos), *further]
        number = 0
        for path in sorted(self.root.glob("data/*/*.parquet")):
            with parquet.ParquetFile(path) as file:
                missing = set(names).difference(file.schema_arrow.names)
                if missing:
                    raise ConfigurationError(f"{path} has no column {', '.join(sorted(missing))}.")
                for batch in file.iter_batches(_ROWS_AT_ONCE, columns=names):
                    rows = {name: self._values(name, batch.column(name)) for name in names}
                    rows |= {name: list(islice(frames, len(batch))) for name, frames in videos.items()}
                    for row in range(len(batch)):
                        if rows[_INDEX][row] != number:
                            raise self._incomplete(f"row {row} of {path} follows frame {number - 1}")
                        number += 1
                        observation = {key: rows[name][row] for key, name in self.columns.items()}
                        yield {
                            "observation": observation.get(SINGLE, observation),
                            **{name: rows[name][row] for name in further},
                        }
        if number != self.total_frames:
            raise self._incomplete(f"its files have {number} frames")

    def _video(self, name: str) -> Iterator[npt.NDArray[Any]]:
        """Decode the images of a video column, episode by episode. A file can contain several episodes."""
        av = require("av", "A LeRobot dataset with videos", "lerobot")
        for length, folder, file, start in self._parts_of_videos(name):
            path = self.root / f"videos/{name}/chunk-{folder:03d}/file-{file:03d}.mp4"
            if not path.exists():
                raise self._incomplete(f"{path} is missing")
            found = 0
            with av.open(str(path)) as container:
                stream = container.streams.video[0]
                stream.thread_type = "AUTO"
                container.seek(int(start / stream.time_base), stream=stream)  # to the last key frame before it
                for frame in container.decode(stream):
                    delay = self.fps * (frame.time - start) - found  # in frames
                    if delay > 0.5:
                        break
                    if delay > -0.5:
                        yield _channels_first(frame.to_ndarray(format="rgb24"))
                        found += 1
                    if found == length:
                        break
            if found < length:
                raise self._incomplete(f"{path} has {found} frames of an episode of {length}")

    def _parts_of_videos(self, name: str) -> Iterator[tuple[int, int, int, float]]:
        """For each episode: its length in frames, the folder and file numbers of its video, its start in seconds."""
        parquet = require("pyarrow.parquet", "A LeRobot dataset", "lerobot")
        columns = ["length", *(f"videos/{name}/{what}" for what in ("chunk_index", "file_index", "from_timestamp"))]
        for path in sorted(self.root.glob("meta/episodes/*/*.parquet")):
            table = parquet.read_table(path, columns=columns)
            yield from zip(*(table[column].to_pylist() for column in columns), strict=True)

    def _incomplete(self, found: str) -> CorruptDataError:
        return CorruptDataError(
            f"The LeRobot dataset {self.root} is not complete: {found}, but meta/info.json promises "
            f"{self.total_frames} frames. Download it again, or call finalize() after recording."
        )

    def _values(self, name: str, column: Any) -> Sequence[npt.NDArray[Any]] | npt.NDArray[Any]:
        """The values of one column in a batch of rows."""
        feature = self.features[name]
        if feature["dtype"] == "image":
            return [_decode_image(image["bytes"]) for image in column.to_pylist()]
        if column.null_count:
            raise CorruptDataError(f"{name!r} of the LeRobot dataset {self.root} has missing values.")
        n_rows = len(column)
        while hasattr(column, "storage") or hasattr(column, "flatten"):
            column = column.storage if hasattr(column, "storage") else column.flatten()
        values: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False).reshape(n_rows, *feature["shape"])
        return values.astype(feature["dtype"], copy=False)


def write_dataset(
    episodes: Iterable[Episode],
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    repo_id: str,
    task: str,
    **kwargs: Any,
) -> LeRobotDataset:
    """Write episodes as a new dataset, with LeRobot's own class."""
    lerobot = require("lerobot.datasets.lerobot_dataset", "Writing a LeRobot dataset")
    parts = observation_space.spaces if isinstance(observation_space, spaces.Dict) else {SINGLE: observation_space}
    names = {key: _column(key, part) for key, part in parts.items()}
    flag = {"shape": (1,), "names": None}
    features = {
        **{names[key]: _feature(part) for key, part in parts.items()},
        _ACTION: _feature(action_space),
        _REWARD: {"dtype": "float32", **flag},
        _DONE: {"dtype": "bool", **flag},
        _TRUNCATED: {"dtype": "bool", **flag},
    }
    dataset: LeRobotDataset = lerobot.LeRobotDataset.create(repo_id, features=features, use_videos=False, **kwargs)
    for episode in episodes:
        observations = (
            episode.observations if isinstance(episode.observations, dict) else {SINGLE: episode.observations}
        )
        columns = {
            **{names[key]: array for key, array in observations.items()},
            _ACTION: episode.actions,
            _REWARD: episode.rewards.astype(np.float32),
            _DONE: episode.terminations | episode.truncations,
            _TRUNCATED: episode.truncations,
        }
        for step in range(len(episode.rewards)):
            frame = {name: array[step].reshape(features[name]["shape"]) for name, array in columns.items()}
            dataset.add_frame({**frame, "task": task})
        dataset.save_episode()
    dataset.finalize()
    return dataset


def _key(column: str) -> str:
    """The key of a column in a Dict observation: ``top`` for ``observation.images.top``."""
    return column.removeprefix("observation.").removeprefix("images.").replace(".", "_")


def _column(key: str, space: spaces.Space[Any]) -> str:
    """The column of a key, named in LeRobot's style."""
    if _is_rgb(space):
        return f"observation.images.{key}" if key else "observation.image"
    return f"observation.{key or 'state'}"


def _is_rgb(space: spaces.Space[Any]) -> bool:
    shape = space.shape or ()
    return space.dtype == np.uint8 and len(shape) == 3 and (shape[0] == 3) != (shape[2] == 3)


def _feature(space: spaces.Space[Any]) -> dict[str, Any]:
    """LeRobot's description of a column."""
    shape = space.shape or (1,)
    if _is_rgb(space):
        size = ["height", "width"]
        return {
            "dtype": "image",
            "shape": shape,
            "names": ["channels", *size] if shape[0] == 3 else [*size, "channels"],
        }
    if len(shape) > 1:
        raise ConfigurationError(f"LeRobot's images have three channels of uint8. It cannot store values of {space}.")
    return {"dtype": str(space.dtype), "shape": shape, "names": None}


def _space(dtype: np.dtype[Any], shape: tuple[int, ...]) -> spaces.Space[Any]:
    """A space that holds every value of a dtype: LeRobot stores no bounds."""
    if dtype.kind == "b":
        return spaces.MultiBinary(shape)
    low, high = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return spaces.Box(low, high, shape, dtype.type)


def _decode_image(image: bytes | None) -> npt.NDArray[Any]:
    """Decode an image, channels first, as SB3's policies expect it."""
    if image is None:
        raise CorruptDataError("An image of the LeRobot dataset is not stored in its file.")
    pixels = np.asarray(require("PIL.Image", "A LeRobot dataset with images", "lerobot").open(io.BytesIO(image)))
    return pixels[None] if pixels.ndim == 2 else _channels_first(pixels)


def _channels_first(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
