"""Save and load a buffer of several parts: one file per part, and a manifest that says which files are current.

Each part has two files, and saves write to them in turn. The manifest, a container, is written last. If a process dies
before that, the manifest still names the files of the previous save, which have not changed.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

from sb3_extra_buffers import __version__
from sb3_extra_buffers.compressed.replay_buffer import CompressedReplayBuffer
from sb3_extra_buffers.errors import (
    ArgumentError,
    ConfigurationError,
    CorruptDataError,
    ExtraBuffersError,
    FileFormatError,
)
from sb3_extra_buffers.persistence import container
from sb3_extra_buffers.persistence.container import Container
from sb3_extra_buffers.persistence.files import as_corrupt, read_arguments
from sb3_extra_buffers.state import SavedState, encode

_NAME = "manifest"
_VERSION = 1
_MOST_PARTS = 1 << 16
"""The largest number of parts in an untrusted manifest."""
_OPTIONS = ("placement", "shards", "prefetch", "on_loss", "ray", "shard_options", "in_process")
"""The options of :meth:`.ShardedReplayBuffer.load`."""
_TURNS = ("a", "b")
"""The suffixes of a part's two files."""


class Manifest(NamedTuple):
    """The contents of a manifest."""

    part_class: type[CompressedReplayBuffer]
    arguments: dict[str, Any]
    """The constructor arguments of each part."""
    turn: str
    """The suffix of the current files."""
    states: list[tuple[int, bool]]
    """The position of each part, and whether it is full."""
    max_priority: float
    """The largest priority so far, which new transitions get."""

    def paths(self, folder: Path) -> list[Path]:
        """The current files of all parts."""
        return [folder / f"part{number}.{self.turn}" for number in range(len(self.states))]


def save_parts(buffer: Any, folder: Path) -> None:
    """Save a ``ShardedReplayBuffer``."""
    folder.mkdir(parents=True, exist_ok=True)
    template, shards = buffer._template, buffer._shards
    try:
        turn = _TURNS[read_manifest(folder).turn == _TURNS[0]]
    except (OSError, ExtraBuffersError):
        turn = _TURNS[0]
    arguments = {**template._arguments(), "buffer_size": buffer.parts[0].buffer_size * buffer.n_envs}
    if shards is not None:
        shards.refresh()  # the learner may not know yet that a shard has refused a segment
    states = [(int(part.pos), bool(part.full)) for part in buffer.parts]
    manifest = Manifest(template._library_class(), arguments, turn, states, buffer.max_priority)
    if shards is not None:
        shards.save(manifest.paths(folder))
    else:
        for part, file in zip(buffer.parts, manifest.paths(folder), strict=True):
            part.save(file)
    write_manifest(folder, manifest)


def load_parts(cls: Any, folder: Path, device: Any, options: dict[str, Any]) -> Any:
    """Load a ``ShardedReplayBuffer`` of class ``cls``."""
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        raise ArgumentError(
            f"{cls.__name__}.load() has no option {unknown[0]!r}. There are: {', '.join(_OPTIONS)}. The saved buffer "
            "decides everything else."
        )
    manifest = read_manifest(folder)
    n_parts, is_remote = len(manifest.states), options.get("placement", "learner") != "learner"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they were shown when the buffer was created
        with as_corrupt(folder / _NAME):
            part = manifest.part_class(**manifest.arguments, device=device)
        size = part.buffer_size * part.n_envs * n_parts if is_remote else part.n_envs
        number = {"parts": n_parts} if is_remote else {}
        arguments = {**manifest.arguments, **number, **options, "buffer_size": size}
        buffer = cls(**arguments, device=device, buffer_class=manifest.part_class)
    if not is_remote:
        loaded = [CompressedReplayBuffer.load(file, device) for file in manifest.paths(folder)]
        _check_parts(manifest, folder, part, loaded)
        buffer._use(loaded)
        return buffer
    buffer._shards.load(manifest.paths(folder), manifest.max_priority)
    if [(part.pos, part.full) for part in buffer.parts] != manifest.states:
        raise CorruptDataError(f"The parts in {folder} are not those that its manifest names.")
    return buffer


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a manifest, which makes its files the current ones."""
    parts = {
        "version": _VERSION,
        "turn": manifest.turn,
        "parts": len(manifest.states),
        "positions": [pos for pos, _ in manifest.states],
        "full": [full for _, full in manifest.states],
        "max_priority": manifest.max_priority,
    }
    meta = {
        "class": manifest.part_class.__name__,
        "library": __version__,
        "arguments": encode(manifest.arguments, "The buffer"),
        "parts": parts,
    }
    container.write(folder / _NAME, meta, {})


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest in a folder. Safe for untrusted files."""
    path = folder / _NAME
    if not path.exists():
        raise ConfigurationError(f"{folder} holds no saved ShardedReplayBuffer: it has no file {path.name!r}.")
    with Container.open(path) as file, as_corrupt(path):
        plain = file.meta.get("parts")
        if not isinstance(plain, dict):
            raise FileFormatError(f"{path} is a saved buffer, not a manifest of several: use load() of its class.")
        parts = SavedState(file, plain)
        if parts.integer("version", 1) > _VERSION:
            raise FileFormatError(
                f"{path} was written by sb3-extra-buffers {file.meta.get('library')}, and this version cannot read it."
            )
        turn, n_parts = parts.value("turn"), parts.integer("parts", 1, _MOST_PARTS)
        if turn not in _TURNS:
            raise parts.error("turn", f"must be one of {_TURNS}, not {turn!r}")
        positions, full = parts.value("positions"), parts.value("full")
        if not _is_list_of(positions, n_parts, int) or not _is_list_of(full, n_parts, bool) or min(positions) < 0:
            raise parts.error("positions", f"must be {n_parts} numbers, each with whether its part is full")
        found = CompressedReplayBuffer._class_to_load(file.meta.get("class"), path)
        states = list(zip(positions, full, strict=True))
        return Manifest(found, read_arguments(file), turn, states, parts.number("max_priority"))


def _is_list_of(values: Any, n: int, kind: type) -> bool:
    return isinstance(values, list) and len(values) == n and all(type(value) is kind for value in values)


def _check_parts(manifest: Manifest, folder: Path, expected: Any, parts: list[Any]) -> None:
    """Raise an error unless the loaded parts are like ``expected``, and where the manifest says that they are."""
    for part, state, path in zip(parts, manifest.states, manifest.paths(folder), strict=True):
        same_class = type(part) is type(expected)
        same_size = (part.buffer_size, part.n_envs) == (expected.buffer_size, expected.n_envs)
        same_spaces = part._digest_of_spaces() == expected._digest_of_spaces()
        if not (same_class and same_size and same_spaces and (part.pos, part.full) == state):
            raise CorruptDataError(f"{path} is not the part that {folder / _NAME} names.")
