"""What all compressed buffers have in common: their arguments, their stores, and how batches become tensors."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, DictReplayBuffer, DictRolloutBuffer, ReplayBuffer
from stable_baselines3.common.preprocessing import get_obs_shape, is_image_space
from stable_baselines3.common.utils import check_for_correct_spaces, get_device
from stable_baselines3.common.vec_env import VecEnv

from sb3_extra_buffers.compressed.arguments import check_options, signature_of
from sb3_extra_buffers.compressed.first_pickles import restore_first_pickles
from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError
from sb3_extra_buffers.persistence import files
from sb3_extra_buffers.persistence.folder import BufferFolder, close_unattended
from sb3_extra_buffers.persistence.tree import Pickled, unpickled
from sb3_extra_buffers.storage.arena import Arena
from sb3_extra_buffers.storage.config import FrameStack, StorageConfig
from sb3_extra_buffers.storage.locking import BufferLock
from sb3_extra_buffers.storage.observation_array import FlatObservations, ObservationArray
from sb3_extra_buffers.storage.observation_store import ObservationStore
from sb3_extra_buffers.storage.outputs import OutputPool
from sb3_extra_buffers.storage.usage import MemoryUsage

if TYPE_CHECKING:
    from typing_extensions import Self

    from sb3_extra_buffers.state import SavedState, State

Observations = ObservationArray | FlatObservations
_PICKLED = "_pickled"
_PACKAGE = __name__.split(".", maxsplit=1)[0]
_library_classes: dict[str, type[BaseCompressedBuffer]] = {}
"""The buffer classes of this library, by the names that files have for them. Those of users are not in here."""

SINGLE = ""
"""The key of the only store where the observation space is not a Dict."""


class BaseCompressedBuffer(BaseBuffer):
    """Put before one of SB3's buffer classes, it replaces the arrays for observations by compressed stores.

    SB3's class does everything else. It never allocates observations: its constructor is given a space without
    elements.

    :param compression_method: ``"auto"``, or a method as listed by ``sb3_extra_buffers.codecs.registry``, with its
        level (``"zstd-5"``, ``"lz4-frame/1"``).
    :param dtypes: ``{"elem_type": ..., "runs_type": ...}`` or the first of them. Lossless unless ``elem_type`` is
        narrower than the observations.
    :param compression_kwargs: Options of the codec.
    :param decompression_kwargs: Options of the codec that concern decoding.
    :param normalize_images: Sample images as floats in [0, 1].
    :param output_dtype: ``"raw"`` samples observations in the dtype of their space, ``"float"`` in float32.
    :param frame_stack: How many frames an observation stacks: ``"auto"`` finds out, ``None`` stores observations whole.
    :param storage: ``"mmap"`` keeps compressed observations in files, for replay buffers that are larger than memory.
    :param path: The folder of these files. What is in there, from a buffer of the same kind, is opened again.
    :param verify: Keep a checksum of every observation, and compare it whenever the observation is read.
    """

    verify: bool = False  # of buffers that were pickled before there was this option
    _n_columns = 1
    _saved_fields: ClassVar[tuple[str, ...]] = ()
    """The arrays that SB3's class keeps beside observations."""
    _rebuilt: ClassVar[tuple[str, ...]] = ("_config", "_folder", "_outputs", "_stores", "_lock", "observations")
    """The attributes of a class that pickles leave out: the constructor creates them and the state fills them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith(f"{_PACKAGE}.") and not cls.__name__.startswith(("_", "Base")):
            _library_classes[cls.__name__] = cls
        cls.__signature__ = signature_of(cls, BaseCompressedBuffer)  # type: ignore[attr-defined]  # which inspect.signature() asks for

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        n_envs: int = 1,
        *,
        compression_method: str = "auto",
        dtypes: Mapping[str, Any] | npt.DTypeLike | None = None,
        compression_kwargs: Mapping[str, Any] | None = None,
        decompression_kwargs: Mapping[str, Any] | None = None,
        normalize_images: bool = False,
        output_dtype: Literal["raw", "float"] = "raw",
        frame_stack: FrameStack = "auto",
        storage: Literal["memory", "mmap"] = "memory",
        path: str | Path | None = None,
        verify: bool = False,
        **of_sb3: Any,
    ) -> None:
        check_options(type(self), of_sb3)
        if buffer_size < 1 or n_envs < 1:
            raise ConfigurationError(f"buffer_size and n_envs must be at least 1, not {buffer_size} and {n_envs}.")
        is_dict = isinstance(observation_space, spaces.Dict)
        if is_dict != isinstance(self, DictReplayBuffer | DictRolloutBuffer):
            name, other = type(self).__name__, "the class with" if is_dict else "the class without"
            raise ConfigurationError(
                f"{name} is not for observation spaces of type {type(observation_space).__name__}: "
                f"use {other} 'Dict' in its name."
            )
        if output_dtype not in ("raw", "float"):
            raise ConfigurationError(f"output_dtype must be 'raw' or 'float', not {output_dtype!r}.")
        self._config = StorageConfig.from_arguments(
            compression_method, dtypes, compression_kwargs, decompression_kwargs, frame_stack
        )
        self._folder = self._open_folder(storage, path)
        self.normalize_images = normalize_images
        self.output_dtype = output_dtype
        self.verify = verify
        self._outputs = OutputPool()
        self._stores: dict[str, ObservationStore] = {}
        self._lock = BufferLock()
        super().__init__(  # SB3's class, which knows more arguments than BaseBuffer
            buffer_size, _without_elements(observation_space), action_space, device=device, n_envs=n_envs, **of_sb3
        )
        self.observation_space = observation_space
        self.obs_shape = get_obs_shape(observation_space)  # type: ignore[assignment]
        self._create_stores()
        self._create_state()
        self._reopen()

    @property
    def device(self) -> th.device:
        """Where batches go. SB3 assigns another one to buffers that it has loaded."""
        return self._outputs.device

    @device.setter
    def device(self, device: th.device) -> None:
        self._outputs.device = device

    def __getstate__(self) -> dict[str, Any]:
        """What pickles and copies are made from: constructor arguments, the state, and attributes of the user's."""
        self._check_folder()
        rebuilt = {name for cls in type(self).__mro__ for name in vars(cls).get("_rebuilt", ())} | {*self._saved_fields}
        attributes = {name: value for name, value in vars(self).items() if name not in rebuilt}
        return {**attributes, _PICKLED: Pickled(self._lock.held, self._pickled)}

    def _pickled(self) -> dict[str, Any]:
        return {"arguments": self._arguments(), "device": self.device, "state": self._state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if _PICKLED not in state:
            restore_first_pickles(self, state)
            return
        attributes = dict(state)
        pickled = attributes.pop(_PICKLED)
        # Not the constructor of a user's class, which may want other arguments. What it sets is an attribute.
        library_class: Any = self._library_class()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # were shown when the buffer was created
            library_class.__init__(self, **self._arguments_to_unpickle(pickled["arguments"]), device="cpu")
        self.__dict__.update(attributes)
        self._restore(unpickled(pickled["state"]))
        self.device = get_device(pickled["device"])

    def _arguments_to_unpickle(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of :meth:`_arguments`, changed so that no memory on a device is needed yet."""
        return arguments

    def __copy__(self) -> Self:
        # Two buffers that share their arrays would corrupt each other.
        return copy.deepcopy(self)

    def _create_state(self) -> None:
        """Create what a class keeps beside SB3's arrays and the stores, which exist by now."""

    def _reopen(self) -> None:
        """Give a buffer on disk what its folder holds. All arrays and stores must exist by now."""
        if self._folder is None:
            return
        for name in self._saved_fields:
            array = getattr(self, name)
            setattr(self, name, self._folder.zeros(array.shape, array.dtype))
        self._folder.reopen(self)

    def to_torch(self, array: npt.NDArray[Any], copy: bool = True) -> th.Tensor:
        device = self._outputs.device
        tensor = OutputPool.to_tensor(array, device)
        if tensor is None and not copy and device.type == "cpu":
            tensor = th.from_numpy(array)  # what as_tensor() would do, but faster
        return super().to_torch(array, copy) if tensor is None else tensor

    def memory_usage(self) -> MemoryUsage:
        """The memory that this buffer takes for what it holds now, by kind."""
        stores = self._stores.values()
        filled = self.size() / self.buffer_size
        fields = sum(array.nbytes for array in vars(self).values() if isinstance(array, np.ndarray))
        raw = sum(math.prod(store.shape) * store.dtype.itemsize for store in stores) * self._n_columns
        transitions = self.size() * self.n_envs
        return MemoryUsage(
            method=", ".join(f"{key}: {store.label}" if key else store.label for key, store in self._stores.items()),
            transitions=transitions,
            payload=sum(store.payload_bytes for store in stores),
            references=sum(store.reference_bytes for store in stores),
            index=sum(store.index_bytes(filled) for store in stores),
            fields=round(filled * fields),
            raw_equivalent=round(filled * fields) + transitions * raw,
        )

    def check(self) -> None:
        """Make sure that the buffer is in a valid state: nothing that it keeps contradicts anything else.

        Reference counts, index, arena and the newest observations are compared; no observation is decoded beside
        those. A buffer that fails is a bug of this library or damaged memory, and raises
        :class:`~sb3_extra_buffers.errors.CorruptDataError`.
        """
        with self._lock.held:
            if not 0 <= self.pos <= self.buffer_size:
                raise CorruptDataError(f"The position is {self.pos} in a buffer of {self.buffer_size} slots.")
            for store in self._stores.values():
                store.check()

    def save(self, path: str | Path, progress: bool | None = None) -> None:
        """Write all there is to a file without pickle in it, for :meth:`load`.

        Saving to the same file again writes what has changed. At any moment, also if the process is killed, the file is
        a whole one. See ``docs/saving.md`` for the format.

        :param progress: Show a progress bar. By default for large buffers, where a person is watching.
        """
        with self._lock.held:
            files.save(self, Path(path), progress)

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: th.device | str = "auto",
        mmap: bool = False,
        env: VecEnv | None = None,
        progress: bool | None = None,
    ) -> Self:
        """A buffer as :meth:`save` wrote it. The file may come from a stranger: nothing in it is run.

        :param device: Where batches go.
        :param mmap: Read what is large when it is needed, from the file, whose checksums are then not compared. Changes
            stay in memory. The file may be saved to or replaced meanwhile, but not changed in any other way.
        :param env: Its spaces must be those of the buffer. ``CompressedHerReplayBuffer`` computes rewards with it.
        """

        def create(name: Any, arguments: dict[str, Any]) -> Any:
            found = cls._class_to_load(name, path)
            if env is not None:
                _check_spaces(env, arguments, path)
            if "env" in arguments:
                arguments["env"] = env
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # were shown when the buffer was created
                return found(**arguments, device=device)

        loaded: Self = files.load(Path(path), create, mmap, progress)
        return loaded

    @classmethod
    def _library_class(cls) -> type[BaseCompressedBuffer]:
        """The class of this library that this class is, or is derived from."""
        return next(base for base in cls.__mro__ if _library_classes.get(base.__name__) is base)

    @classmethod
    def _class_to_load(cls, name: Any, path: str | Path) -> type[Self]:
        """The class that a file names: this one, or one derived from it. A user's class loads files of its base."""
        if isinstance(name, str) and name not in _library_classes:
            # Some modules are imported when their classes are first asked for.
            package = "gpu_buffers" if name.startswith("Gpu") else "compressed"
            getattr(import_module(f"{_PACKAGE}.{package}"), name, None)
        saved: Any = _library_classes.get(name) if isinstance(name, str) else None
        if saved is None:
            raise CorruptDataError(f"{path} makes no sense: it is of class {name!r}.")
        if issubclass(saved, cls):
            return saved  # type: ignore[no-any-return]
        if cls not in _library_classes.values() and issubclass(cls, saved):
            return cls
        raise ConfigurationError(f"{path} holds a {name}, not a {cls.__name__}: use {name}.load().")

    def flush(self) -> None:
        """Make sure that all that a buffer on disk holds now is there after the process has gone, however it goes.

        Buffers in memory have nothing to do.
        """
        if self._folder is not None:
            with self._lock.held:
                self._folder.flush(self)

    def close(self) -> None:
        """Flush a buffer on disk and let go of its folder. Nothing can be added afterwards.

        This also happens when the buffer is garbage-collected, and when the process ends without being killed.
        """
        if self._folder is not None and self._folder.is_open:
            self.flush()
            self._folder.close()

    def __del__(self) -> None:
        # While the interpreter is taken apart it is too late, but before that all buffers are closed.
        if getattr(self, "_folder", None) is not None and not sys.is_finalizing():
            close_unattended(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_folder(self) -> None:
        """Raise an error if this is a buffer on disk whose folder cannot be read."""
        if self._folder is not None:
            self._folder.before_reading()

    def _open_folder(self, storage: str, path: str | Path | None) -> BufferFolder | None:
        if storage not in ("memory", "mmap"):
            raise ConfigurationError(f"storage must be 'memory' or 'mmap', not {storage!r}.")
        if (storage == "mmap") != (path is not None):
            raise ConfigurationError(f"storage='mmap' goes with a path, but got storage={storage!r}, path={path!r}.")
        if path is None:
            return None
        if not isinstance(self, ReplayBuffer):
            raise ConfigurationError(
                f"storage='mmap' is for replay buffers: a {type(self).__name__} is emptied after every rollout."
            )
        return BufferFolder(Path(path))

    def _arguments(self) -> dict[str, Any]:
        """What the constructor is to be called with to make a buffer like this one, ``device`` aside."""
        recipe, elem_type = self._config.recipe, self._config.elem_type
        return {
            "buffer_size": self.buffer_size,
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "n_envs": self.n_envs,
            "compression_method": "auto" if recipe is None else str(recipe.method),
            "compression_kwargs": {} if recipe is None else dict(recipe.options),
            "dtypes": None if elem_type is None else {"elem_type": elem_type},
            "normalize_images": self.normalize_images,
            "output_dtype": self.output_dtype,
            "frame_stack": self._config.frame_stack,
            "verify": self.verify,
        }

    def _state(self) -> State:
        return {
            "pos": self.pos,
            "full": self.full,
            "fields": {name: getattr(self, name) for name in self._saved_fields},
            "stores": {key: store.state() for key, store in self._stores.items()},
        }

    def _restore(self, state: SavedState) -> None:
        """Take over what :meth:`_state` gave, in a buffer that was made with the same arguments."""
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

    def _create_stores(self) -> None:
        parts = {SINGLE: self.observation_space}
        if isinstance(self.observation_space, spaces.Dict):
            parts = dict(self.observation_space.spaces)
        for key, space in parts.items():
            if space.dtype is None:
                raise ConfigurationError(
                    f"An observation space of type {type(space).__name__} cannot be stored. "
                    "Wrap the environment so that its observations are arrays, or a Dict of arrays."
                )
            is_image = is_image_space(space, check_channels=False, normalized_image=False)
            self._stores[key] = self._make_store(
                key,
                is_image,
                n_slots=self.buffer_size,
                n_envs=self.n_envs,
                shape=get_obs_shape(space),
                dtype=np.dtype(space.dtype),
                n_columns=self._n_columns,
                as_float=self.output_dtype == "float" or (self.normalize_images and is_image),
                divisor=255.0 if self.normalize_images and is_image else 1.0,
                verify=self.verify,
                lock=self._lock,
            )

    def _make_store(self, key: str, is_image: bool, **arguments: Any) -> ObservationStore:
        """The store of one key, with the arguments that all kinds of stores take."""
        folder = self._folder
        return ObservationStore(
            config=self._config,
            outputs=self._outputs,
            make_arena=Arena if folder is None else folder.arena_maker(key),
            make_zeros=np.zeros if folder is None else folder.zeros,
            **arguments,
        )

    def _column(
        self, column: int, shift: int = 0, guard: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Any:
        """A column of all stores, as SB3 expects it: an array, or a dict of arrays."""
        arrays = {key: ObservationArray(store, column, shift, guard) for key, store in self._stores.items()}
        return arrays if isinstance(self.observation_space, spaces.Dict) else arrays[SINGLE]


class DummyCls:
    """Stands in for a buffer class that is not wanted.

    For instance: ``DQN.load(path, custom_objects={"replay_buffer_class": DummyCls})``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def _check_spaces(env: VecEnv, arguments: dict[str, Any], path: str | Path) -> None:
    try:
        check_for_correct_spaces(env, arguments["observation_space"], arguments["action_space"])
    except ValueError as error:
        raise ConfigurationError(f"{path} was saved for another environment. {error}") from error


def _without_elements(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """A space of the same kind whose observations take no memory."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _without_elements(part) for key, part in space.spaces.items()})
    if space.dtype is None or space.shape is None:
        raise ConfigurationError(
            f"An observation space of type {type(space).__name__} cannot be stored. "
            "Wrap the environment so that its observations are arrays, or a Dict of arrays."
        )
    return spaces.Box(0, 1, shape=(0,), dtype=space.dtype)
