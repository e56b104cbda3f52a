"""Buffers whose observations lie on disk (``storage="mmap"``).

The folder of such a buffer holds, for each of its stores, a file with the bytes of the arena, mapped into memory, and
``state``, all the rest, in the format of :mod:`.container`, as of the last flush. Bytes that ``state`` refers to are
not written to before the next flush, so that it stays true even if the process is killed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import ConfigurationError, SaveError
from sb3_extra_buffers.persistence import container
from sb3_extra_buffers.persistence.container import Container
from sb3_extra_buffers.persistence.description import as_corrupt, describe
from sb3_extra_buffers.persistence.state import SavedState
from sb3_extra_buffers.storage.extent_arena import ExtentArena
from sb3_extra_buffers.storage.memory import FileMemory, zeros_in_file

if TYPE_CHECKING:
    from sb3_extra_buffers.compressed.base import BaseCompressedBuffer

STATE = "state"
_LOCK = "lock"
_WORTH_A_FLUSH = 16 << 20


class BufferFolder:
    """The folder of one buffer, which no other buffer may use meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        # Closed when the buffer is, or when it has gone: then others may use the folder.
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT)
        self._release = weakref.finalize(self, os.close, descriptor)
        if not _lock(descriptor):
            self._release()
            raise ConfigurationError(f"{path} is in use by another buffer. Close that one, or choose another path.")

    @property
    def is_open(self) -> bool:
        return self._release.alive

    def arena_maker(self, key: str) -> Callable[[], ExtentArena]:
        """What makes an empty arena for the store of ``key``, each in a file of its own."""
        return functools.partial(self._new_arena, quote(key, safe="") or "observations")

    def _new_arena(self, name: str) -> ExtentArena:
        # Never a name that was used before, which ``state`` may still mean.
        return ExtentArena(FileMemory(self.path / f"{name}.{secrets.token_hex(4)}.arena"))

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An array that takes no memory, either. It goes with the process: what is to stay is in ``state``."""
        return zeros_in_file(self.path, shape, dtype)

    def before_adding(self, buffer: BaseCompressedBuffer) -> None:
        """Flush if so much has died since the last time that files would grow for the sake of what is dead."""
        self._check_open()
        for arena in _arenas(buffer):
            if arena.held_bytes > max(_WORTH_A_FLUSH, arena.live_bytes // 8):
                self.flush(buffer)

    def flush(self, buffer: BaseCompressedBuffer) -> None:
        """Make what is in the folder what is in ``buffer``."""
        self._check_open()
        arenas = _arenas(buffer)
        try:
            for arena in arenas:
                arena.memory.flush()
        except OSError as error:
            raise SaveError(
                f"{self.path} could not be written: {error}. The state of the last flush is there."
            ) from error
        meta, arrays = describe(buffer)
        kept = {name: array for name, array in arrays.items() if not name.endswith("/arena/bytes")}
        container.write(self.path / STATE, meta, kept)
        used = {arena.memory.path for arena in arenas}
        for arena in arenas:
            arena.release_held()
        self._remove_all_but(used)

    def reopen(self, buffer: BaseCompressedBuffer) -> None:
        """Give a buffer that was just made what was in the folder, if there was anything."""
        state = self.path / STATE
        if not state.exists():
            return
        with Container.open(state) as file, as_corrupt(state):
            own, _ = describe(buffer)
            differing = _differences(own, file.meta)
            if differing:
                raise ConfigurationError(
                    f"{self.path} holds a buffer that was made with other arguments: {', '.join(differing)}. "
                    f"Use {file.meta.get('class')}.load() to open it, or choose another path."
                )
            buffer._restore(SavedState(file, file.meta["state"]))
        self._remove_all_but({arena.memory.path for arena in _arenas(buffer)})

    def close(self) -> None:
        self._release()

    def _check_open(self) -> None:
        if not self.is_open:
            raise ConfigurationError(f"The buffer in {self.path} is closed. Open it again with load().")

    def _remove_all_but(self, used: set[Path]) -> None:
        for path in self.path.glob("*.arena"):
            if path not in used:
                with contextlib.suppress(OSError):
                    path.unlink()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a buffer has its bytes in memory.
        return _nothing, ()


def _nothing() -> None:
    return None


def _arenas(buffer: BaseCompressedBuffer) -> list[Any]:
    return [store.frames.arena for store in buffer._stores.values()]


def _differences(own: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    if own["class"] != saved.get("class"):
        return [f"class {saved.get('class')}"]
    arguments = saved.get("arguments")
    arguments = arguments if isinstance(arguments, dict) else {}
    return [name for name, value in own["arguments"].items() if name not in arguments or arguments[name] != value]


def _lock(descriptor: int) -> bool:
    """Take hold of a file until it is closed; false if somebody else has. Where the system cannot, nobody checks."""
    if os.name != "posix":
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
