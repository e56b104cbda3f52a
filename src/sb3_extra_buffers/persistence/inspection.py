"""Report what is in a saved buffer without loading it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymnasium import spaces
from stable_baselines3.common.preprocessing import get_obs_shape

from sb3_extra_buffers.persistence.container import VERSION, Container, StoredArray
from sb3_extra_buffers.persistence.files import as_corrupt, bar, state_file
from sb3_extra_buffers.state import decode
from sb3_extra_buffers.storage.usage import readable


@dataclass(frozen=True)
class FileReport:
    """What is in a file. ``str()`` formats it as a page of text."""

    path: Path
    class_name: str
    library: str
    """The version of the library that wrote it."""
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    n_envs: int
    capacity: int
    """Transitions that the buffer has room for."""
    transitions: int
    """Transitions that are in the buffer."""
    methods: dict[str, str]
    """The compression method of each key; the key is empty if the space is not a Dict."""
    arrays: dict[str, StoredArray]
    file_bytes: int
    stored_bytes: int
    """Bytes of the file that are up to date. The others are left over from earlier saves."""
    raw_bytes: int
    """The bytes that SB3's buffer needs for the same transitions."""
    damaged: list[str] | None
    """Arrays that do not agree with their checksums; ``None`` if checksums were not compared."""

    @property
    def ratio(self) -> float:
        """How many times smaller than SB3's buffer."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else 1.0

    def __str__(self) -> str:
        checksums = "not compared" if self.damaged is None else "all right"
        if self.damaged:
            checksums = f"WRONG for {', '.join(self.damaged)}"
        rows = {
            "file": self.path,
            "class": self.class_name,
            "written by": f"sb3-extra-buffers {self.library}, format version {VERSION}",
            "observations": self.observation_space,
            "actions": self.action_space,
            "transitions": f"{self.transitions:,} of {self.capacity:,}, from {self.n_envs} environments",
            "method": ", ".join(f"{key}: {method}" if key else method for key, method in self.methods.items()),
            "size": f"{readable(self.file_bytes)}, {readable(self.stored_bytes)} of it up to date",
            "SB3 would take": f"{readable(self.raw_bytes)}, {self.ratio:.1f} times as much",
            "checksums": checksums,
        }
        width = max(map(len, self.arrays), default=0)
        arrays = [
            f"  {name:<{width}}  {array.dtype!s:>8}  {readable(array.stored_bytes):>10}  {array.shape}"
            for name, array in self.arrays.items()
        ]
        return "\n".join([*(f"{name:<16}{value}" for name, value in rows.items()), "arrays", *arrays])


def inspect_file(path: str | Path, verify: bool = True, progress: bool | None = None) -> FileReport:
    """Report what is in a file, or in the folder of a buffer on disk, without loading it.

    :param verify: Compare all checksums, which reads the whole file.
    """
    path = Path(path)
    with Container.open(state_file(path)) as file, as_corrupt(path):
        damaged = None
        if verify:
            size = sum(array.nbytes for array in file.arrays.values())
            with bar(f"checking {path.name}", size, progress) as update:
                damaged = file.verify(update)
        return _report(path, file, damaged)


def _report(path: Path, file: Container, damaged: list[str] | None) -> FileReport:
    arguments, state = file.meta["arguments"], file.meta["state"]
    observation_space, action_space = decode(arguments["observation_space"]), decode(arguments["action_space"])
    n_envs = decode(arguments["n_envs"])
    n_slots = math.prod(file.arrays["fields/rewards"].shape) // n_envs
    size = n_slots if state["full"] else state["pos"]
    is_dict = isinstance(observation_space, spaces.Dict)
    parts: list[Any] = list(observation_space.spaces.values()) if is_dict else [observation_space]
    observation = sum(math.prod(get_obs_shape(part)) * part.dtype.itemsize for part in parts)
    has_next = "Rollout" not in file.meta["class"] and not arguments["optimize_memory_usage"]
    fields = sum(array.nbytes for name, array in file.arrays.items() if name.startswith("fields/"))
    mapped = sum(map(_mapped_bytes, state["stores"].values())) if path.is_dir() else 0
    return FileReport(
        path=path,
        class_name=file.meta["class"],
        library=file.meta["library"],
        observation_space=observation_space,
        action_space=action_space,
        n_envs=n_envs,
        capacity=n_slots * n_envs,
        transitions=size * n_envs,
        methods={key: _method(store) for key, store in state["stores"].items()},
        arrays=file.arrays,
        file_bytes=file.path.stat().st_size + mapped,
        stored_bytes=file.stored_bytes + mapped,
        raw_bytes=size * n_envs * observation * (2 if has_next else 1) + fields * size // n_slots,
        damaged=damaged,
    )


def _mapped_bytes(store: dict[str, Any]) -> int:
    """The number of live bytes in the arena's file of a store on disk."""
    return sum(end - start for start, end in store["frames"]["arena"]["extents"])


def _method(store: dict[str, Any]) -> str:
    if "method" not in store:
        return "none"
    stack = store["layout"]["stack"]
    return f"{store['method']}, {stack} frames each" if stack > 1 else str(store["method"])
