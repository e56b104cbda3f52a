"""Saving, loading, pickling and buffers on disk, for all buffer classes."""

from __future__ import annotations

import copy
import sys
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.utils import check_for_correct_spaces, get_device
from stable_baselines3.common.vec_env import VecEnv

from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError
from sb3_extra_buffers.persistence import container
from sb3_extra_buffers.persistence.container import Container
from sb3_extra_buffers.persistence.files import REMOVED_ARGUMENTS, as_corrupt, bar, describe, read_arguments, state_file
from sb3_extra_buffers.persistence.folder import BufferFolder, close_unattended
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.locking import BufferLock
from sb3_extra_buffers.storage.pickling import Pickled, unpickled

if TYPE_CHECKING:
    from typing_extensions import Self

_PICKLED = "_pickled"
_PACKAGE = __name__.split(".", maxsplit=1)[0]


class SaveableBuffer(BaseBuffer):
    """Saves a buffer as its constructor arguments and its state, which is a tree of values and arrays.

    Files of :meth:`save`, folders of buffers on disk, pickles and copies all hold this tree.
    """

    _saved_fields: ClassVar[tuple[str, ...]] = ()
    """The arrays to save besides the observations."""
    _rebuilt: ClassVar[tuple[str, ...]] = ("_config", "_folder", "_outputs", "_stores", "_lock", "observations")
    """Attributes that pickles leave out: the constructor creates them, and the state fills them."""
    _folder: BufferFolder | None
    _lock: BufferLock
    _stores: Mapping[str, Any]

    def save(self, path: str | Path, progress: bool | None = None) -> None:
        """Write the buffer to a file without pickle, for :meth:`load`.

        Saving to the same file again writes only what has changed. If the process is killed while saving, the file
        still holds the previous save. See ``docs/saving.md`` for the format.

        :param progress: Show a progress bar. By default, only for large buffers in a terminal.
        """
        path = Path(path)
        with self._lock.held:
            self._check_folder()
            meta, arrays = describe(self)
            path.parent.mkdir(parents=True, exist_ok=True)
            size = sum(value.data.nbytes for value in arrays.values())
            with bar(f"saving {path.name}", size, progress) as update:
                container.write(path, meta, arrays, update)

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: th.device | str = "auto",
        mmap: bool = False,
        env: VecEnv | None = None,
        progress: bool | None = None,
    ) -> Self:
        """Load a buffer that :meth:`save` wrote. Safe for untrusted files: loading runs no code from the file.

        :param device: The device of batches.
        :param mmap: For buffers that are larger than memory. Large arrays are copied to an unnamed temporary file in
            the same folder, and read from it on access. Only what you add takes memory.
        :param env: Must have the spaces of the buffer. ``CompressedHerReplayBuffer`` computes rewards with it.
        :param progress: Show a progress bar. By default, only for large buffers in a terminal.
        """
        path = Path(path)
        with Container.open(state_file(path), mmap) as file, as_corrupt(path):
            found, arguments = cls._class_to_load(file.meta.get("class"), path), read_arguments(file)
            if env is not None:
                _check_spaces(env, arguments, path)
            if "env" in arguments:
                arguments["env"] = env
            if path.is_dir():
                arguments |= {"storage": "mmap", "path": path}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they were shown when the buffer was created
                buffer = found(**arguments, device=device)
            if path.is_dir():
                buffer._check_folder()
                return buffer
            size = sum(array.nbytes for array in file.arrays.values())
            with bar(f"loading {path.name}", size, progress) as update:
                buffer._restore(SavedState(file, file.meta["state"], progress=update))
        return buffer

    def flush(self) -> None:
        """Write a buffer on disk to its folder, so that it survives a crash. Does nothing for buffers in memory."""
        if self._folder is not None:
            with self._lock.held:
                self._folder.flush(self)

    def close(self) -> None:
        """Flush a buffer on disk and unlock its folder. Nothing can be added afterwards.

        Garbage collection and the end of the process close a buffer, too, unless the process is killed.
        """
        if self._folder is not None and self._folder.is_open:
            self.flush()
            self._folder.close()

    def __del__(self) -> None:
        # At interpreter shutdown, atexit has closed all buffers already.
        if getattr(self, "_folder", None) is not None and not sys.is_finalizing():
            close_unattended(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """What pickles and copies contain: attributes (including a user's own), constructor arguments and state."""
        self._check_folder()
        rebuilt = {name for cls in type(self).__mro__ for name in vars(cls).get("_rebuilt", ())} | {*self._saved_fields}
        # A copy, because another thread may add attributes meanwhile.
        attributes = {name: value for name, value in vars(self).copy().items() if name not in rebuilt}
        state = Pickled(self._lock.held, self._state)
        return {**attributes, _PICKLED: {"arguments": self._arguments(), "device": self.device, "state": state}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if _PICKLED not in state:
            self._restore_pickle_of_dev0(state)
            return
        attributes = dict(state)
        pickled = attributes.pop(_PICKLED)
        # Not the constructor of a user's class, which may need other arguments. Its attributes are restored below.
        library_class: Any = self._library_class()
        arguments = {name: value for name, value in pickled["arguments"].items() if name not in REMOVED_ARGUMENTS}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were shown when the buffer was created
            library_class.__init__(self, **self._arguments_to_unpickle(arguments), device="cpu")
        vars(self).update(attributes)
        self._restore(unpickled(pickled["state"]))
        self.device = get_device(pickled["device"])

    def _restore_pickle_of_dev0(self, attributes: dict[str, Any]) -> None:
        """Restore a pickle of version 1.0.0.dev0. It has all attributes except those added later."""
        device = attributes.get("device")  # a property now
        vars(self).update({name: value for name, value in attributes.items() if name != "device"})
        if "_lock" not in attributes:
            self._lock = BufferLock()
            for store in self._stores.values():
                store.lock = self._lock
                store.outputs = attributes["_outputs"]
        if device is not None:
            self.device = device

    def _arguments_to_unpickle(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Constructor arguments that work on a machine that has only a CPU."""
        return arguments

    def __copy__(self) -> Self:
        # Two buffers that share their arrays would corrupt each other.
        return copy.deepcopy(self)

    @abstractmethod
    def _arguments(self) -> dict[str, Any]:
        """The constructor arguments, except ``device``, of an empty buffer like this one.

        Options with an attribute of the same name are included automatically.
        """

    def _state(self) -> State:
        return {
            "pos": self.pos,
            "full": self.full,
            "fields": {name: self._field_rows(name) for name in self._saved_fields},
            "stores": {key: store.state() for key, store in self._stores.items()},
        }

    def _field_rows(self, name: str, slots: npt.NDArray[np.int64] | None = None) -> npt.NDArray[Any]:
        """An array of ``_saved_fields``, or some slots of it."""
        field: npt.NDArray[Any] = getattr(self, name)
        return field if slots is None else field[slots]

    def _restore(self, state: SavedState) -> None:
        """Load the result of :meth:`_state` into a new buffer with the same arguments."""
        self.pos = state.integer("pos", 0, self.buffer_size)
        self.full = state.boolean("full")
        fields, stores = state.part("fields"), state.part("stores")
        for name in self._saved_fields:
            self._restore_field(name, fields)
        for key, store in self._stores.items():
            store.restore(stores.part(key))

    def _restore_field(self, name: str, fields: SavedState) -> None:
        fresh = getattr(self, name)
        saved = fields.array(name, fresh.dtype, fresh.shape)
        if self._folder is None:
            setattr(self, name, saved)
        else:
            fresh[:] = saved

    def _open_folder(self, storage: str, path: str | Path | None) -> BufferFolder | None:
        if storage not in ("memory", "mmap"):
            raise ConfigurationError(f"storage must be 'memory' or 'mmap', not {storage!r}.")
        if (storage == "mmap") != (path is not None):
            raise ConfigurationError(
                f"Pass both storage='mmap' and path, or neither of them, not storage={storage!r} with path={path!r}."
            )
        if path is None:
            return None
        if not isinstance(self, ReplayBuffer):
            raise ConfigurationError(
                f"storage='mmap' is for replay buffers: a {type(self).__name__} is emptied after every rollout."
            )
        return BufferFolder(Path(path))

    def _reopen(self) -> None:
        """Load a buffer on disk from its folder. Call this when all arrays and stores exist."""
        if self._folder is None:
            return
        for name in self._saved_fields:
            array = getattr(self, name)
            setattr(self, name, self._folder.zeros(array.shape, array.dtype))
        self._folder.reopen(self)

    def _check_folder(self) -> None:
        """Raise an error for a buffer on disk whose folder cannot be read."""
        if self._folder is not None:
            self._folder.before_reading()

    @classmethod
    def _library_class(cls) -> type[SaveableBuffer]:
        """This class, or the library's class that a user's class is derived from."""
        return next(base for base in cls.__mro__ if _is_of_library(base) and not base.__name__.startswith("_"))

    @classmethod
    def _class_to_load(cls, name: Any, path: Path) -> type[Self]:
        """The class that a file names: this class or a derived one. A user's class also loads files of its base."""
        package = import_module(f"{_PACKAGE}.{'gpu_buffers' if str(name).startswith('Gpu') else 'compressed'}")
        saved = getattr(package, str(name), None)
        if not isinstance(saved, type) or not issubclass(saved, SaveableBuffer) or name.startswith("Base"):
            raise CorruptDataError(f"{path} is corrupt: it is of class {name!r}.")
        if issubclass(saved, cls):
            return saved
        if not _is_of_library(cls) and issubclass(cls, saved):
            return cls
        raise ConfigurationError(f"{path} holds a {name}, not a {cls.__name__}: use {name}.load().")


def _is_of_library(cls: type) -> bool:
    return cls.__module__.startswith(f"{_PACKAGE}.")


def _check_spaces(env: VecEnv, arguments: dict[str, Any], path: Path) -> None:
    try:
        check_for_correct_spaces(env, arguments["observation_space"], arguments["action_space"])
    except ValueError as error:
        raise ConfigurationError(f"{path} was saved for another environment. {error}") from error
