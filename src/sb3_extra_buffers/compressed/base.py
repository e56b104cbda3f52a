"""The base class of all compressed buffers: options, observation stores and memory usage."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, DictRolloutBuffer
from stable_baselines3.common.preprocessing import get_obs_shape, is_image_space

from sb3_extra_buffers.compatibility import OldAttributes
from sb3_extra_buffers.compressed.arguments import check_options, signature_of
from sb3_extra_buffers.compressed.rows import SINGLE
from sb3_extra_buffers.compressed.segments import SegmentBuffer
from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError
from sb3_extra_buffers.storage.base_store import BaseStore
from sb3_extra_buffers.storage.config import FrameStack, Preference, StorageConfig
from sb3_extra_buffers.storage.locking import BufferLock
from sb3_extra_buffers.storage.observation_array import ObservationArray
from sb3_extra_buffers.storage.observation_store import ObservationStore
from sb3_extra_buffers.storage.outputs import OutputPool
from sb3_extra_buffers.storage.plain_store import PlainStore, suits
from sb3_extra_buffers.storage.usage import MemoryUsage, readable


class BaseCompressedBuffer(OldAttributes, SegmentBuffer):
    """A mixin for SB3's buffer classes that keeps observations in compressed stores instead of arrays.

    SB3's class does everything else. Its constructor gets a space without elements, so it allocates no memory for
    observations.

    :param compression_method: ``"auto"``, or a method of ``sb3_extra_buffers.codecs.registry``, with a level if it has
        one (``"zstd-5"``, ``"lz4-frame/1"``).
    :param dtypes: ``{"elem_type": ..., "runs_type": ...}``, or ``elem_type`` alone. Storage is lossless unless
        ``elem_type`` is narrower than the dtype of the observations.
    :param compression_kwargs: Options of the codec.
    :param decompression_kwargs: Options of the codec for decoding.
    :param normalize_images: Sample images as floats in [0, 1].
    :param output_dtype: ``"raw"`` samples observations in the dtype of their space, ``"float"`` in float32.
    :param frame_stack: The number of frames in an observation. ``"auto"`` detects it, ``None`` stores observations
        whole.
    :param prefer: What ``auto`` optimizes. ``"balanced"`` saves memory, but rejects methods that, by its own
        measurement, read observations more slowly than SB3's buffer. ``"memory"`` saves more memory, and accepts
        methods that take up to twice as long as SB3 to read. ``"speed"`` takes the fastest method.
    :param storage: ``"mmap"`` keeps compressed observations in files, for replay buffers that are larger than memory.
    :param path: The folder of these files. If it holds a buffer with the same arguments, that buffer is reopened.
    :param verify: Keep a checksum of every observation, and compare it whenever the observation is read.
    """

    verify: bool = False  # for pickles of 1.0.0.dev0, which lack this option
    _n_columns = 1
    """Observations that a store keeps per slot and environment: 2 if next observations are stored, too."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__ = signature_of(cls, BaseCompressedBuffer)  # type: ignore[attr-defined]  # for inspect.signature()

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
        prefer: Preference = "balanced",
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
                f"{name} does not support observation spaces of type {type(observation_space).__name__}: "
                f"use {other} 'Dict' in its name."
            )
        if output_dtype not in ("raw", "float"):
            raise ConfigurationError(f"output_dtype must be 'raw' or 'float', not {output_dtype!r}.")
        self._config = StorageConfig.from_arguments(
            compression_method, dtypes, compression_kwargs, decompression_kwargs, frame_stack, prefer
        )
        self._folder = self._open_folder(storage, path)
        self.normalize_images = normalize_images
        self.output_dtype = output_dtype
        self.verify = verify
        self._outputs = OutputPool()
        self._stores: dict[str, BaseStore] = {}
        self._lock = BufferLock()
        super().__init__(  # SB3's class, which has more arguments than BaseBuffer
            buffer_size, _without_elements(observation_space), action_space, device=device, n_envs=n_envs, **of_sb3
        )
        self.observation_space = observation_space
        self.obs_shape = get_obs_shape(observation_space)  # type: ignore[assignment]
        self._create_stores()
        self._create_state()
        self._reopen()

    def __repr__(self) -> str:
        if "_stores" not in vars(self) or "pos" not in vars(self):  # the constructor failed or is still running
            return object.__repr__(self)
        usage = self.memory_usage()
        return (
            f"{type(self).__name__}({usage.transitions:,} of {self.buffer_size * self.n_envs:,} transitions, "
            f"n_envs={self.n_envs}, observations={self.observation_space}, actions={self.action_space}, "
            f"method={usage.method!r}, memory={readable(usage.total)!r})"
        )

    @property
    def device(self) -> th.device:
        """The device of batches. SB3 assigns it after loading a buffer."""
        return self._outputs.device

    @device.setter
    def device(self, device: th.device) -> None:
        self._outputs.device = device

    def _create_state(self) -> None:
        """Create the attributes that a derived class adds. SB3's arrays and the stores exist already."""

    def to_torch(self, array: npt.NDArray[Any], copy: bool = True) -> th.Tensor:
        device = self._outputs.device
        if not copy and device.type == "cpu":
            return th.from_numpy(array)  # faster than as_tensor()
        tensor = OutputPool.to_tensor(array, device)
        if tensor is not None:
            return tensor
        if device.type == "cuda" and th.cuda.is_available():
            # SB3 does not pin memory, so its copies wait for all work queued on the GPU.
            return th.from_numpy(array).pin_memory().to(device, non_blocking=True)
        return super().to_torch(array, copy)

    def memory_usage(self) -> MemoryUsage:
        """The memory that the stored transitions take, by kind."""
        filled, transitions = self.size() / self.buffer_size, self.size() * self.n_envs
        attributes = list(vars(self).values())  # a copy: another thread may add attributes meanwhile
        fields = round(filled * sum(array.nbytes for array in attributes if isinstance(array, np.ndarray)))
        stores = self._stores.values()
        observation = sum(math.prod(store.shape) * store.dtype.itemsize for store in stores)
        raw = fields + transitions * observation * self._n_columns
        return MemoryUsage.of_stores(self._stores, filled, transitions, fields, raw)

    def check(self) -> None:
        """Check all invariants of the buffer.

        This compares reference counts, the index, the arena and the newest observations. Older observations are not
        decoded. A :class:`~sb3_extra_buffers.errors.CorruptDataError` means a bug in this library or damaged memory.
        """
        with self._lock.held:
            if not 0 <= self.pos <= self.buffer_size:
                raise CorruptDataError(f"The position is {self.pos} in a buffer of {self.buffer_size} slots.")
            for store in self._stores.values():
                store.check()

    def _arguments(self) -> dict[str, Any]:
        recipe, elem_type = self._config.recipe, self._config.elem_type
        names = inspect.signature(self._library_class()).parameters.keys() - {"device", "storage", "path", "dtypes"}
        return {
            **{name: getattr(self, name) for name in sorted(names) if hasattr(self, name)},
            "compression_method": "auto" if recipe is None else str(recipe.method),
            "compression_kwargs": {} if recipe is None else dict(recipe.options),
            "dtypes": None if elem_type is None else {"elem_type": elem_type},
            "frame_stack": self._config.frame_stack,
            "prefer": self._config.prefer,
        }

    def _create_stores(self) -> None:
        parts = {SINGLE: self.observation_space}
        if isinstance(self.observation_space, spaces.Dict):
            parts = dict(self.observation_space.spaces)
        for key, space in parts.items():
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

    def _make_store(self, key: str, is_image: bool, **arguments: Any) -> BaseStore:
        """Create the store of one key."""
        folder = self._folder
        arguments |= {"config": self._config, "outputs": self._outputs}
        if folder is not None:
            return ObservationStore(make_arena=folder.arena_maker(key), make_zeros=folder.zeros, **arguments)
        if suits(self._config, arguments["shape"], arguments["dtype"]):
            return PlainStore(**arguments)
        return ObservationStore(**arguments)

    def _column(self, column: int, shift: int = 0) -> Any:
        """A column of all stores in SB3's form: an array, or a dict of arrays. Index ``t`` reads slot ``t + shift``."""
        arrays = {key: ObservationArray(store, column, shift) for key, store in self._stores.items()}
        return arrays if isinstance(self.observation_space, spaces.Dict) else arrays[SINGLE]


class DummyCls:
    """A placeholder to load a model without its buffer.

    For example, ``DQN.load(path, custom_objects={"replay_buffer_class": DummyCls})``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def _without_elements(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """A space of the same kind whose observations have no elements."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _without_elements(part) for key, part in space.spaces.items()})
    if space.dtype is None or space.shape is None:
        raise ConfigurationError(
            f"An observation space of type {type(space).__name__} cannot be stored. "
            "Wrap the environment so that its observations are arrays, or a Dict of arrays."
        )
    return spaces.Box(0, 1, shape=(0,), dtype=space.dtype)
