"""What all compressed buffers have in common: their arguments, their stores, and how batches become tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, DictReplayBuffer, DictRolloutBuffer
from stable_baselines3.common.preprocessing import get_obs_shape, is_image_space

from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.storage.config import FrameStack, StorageConfig
from sb3_extra_buffers.storage.observation_array import FlatObservations, ObservationArray
from sb3_extra_buffers.storage.observation_store import ObservationStore
from sb3_extra_buffers.storage.outputs import OutputPool
from sb3_extra_buffers.storage.usage import MemoryUsage

Observations = ObservationArray | FlatObservations
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
    :param frame_stack: How many frames an observation stacks: ``"auto"`` finds out, ``None`` stores observations whole.
    """

    _n_columns = 1

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *args: Any,
        compression_method: str = "auto",
        dtypes: Mapping[str, Any] | npt.DTypeLike | None = None,
        compression_kwargs: Mapping[str, Any] | None = None,
        decompression_kwargs: Mapping[str, Any] | None = None,
        normalize_images: bool = False,
        output_dtype: Literal["raw", "float"] = "raw",
        frame_stack: FrameStack = "auto",
        **kwargs: Any,
    ) -> None:
        if buffer_size < 1 or kwargs.get("n_envs", 1) < 1:
            raise ConfigurationError(
                f"buffer_size and n_envs must be at least 1, not {buffer_size} and {kwargs.get('n_envs', 1)}."
            )
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
        self.normalize_images = normalize_images
        self.output_dtype = output_dtype
        self._outputs = OutputPool()
        self._stores: dict[str, ObservationStore] = {}
        super().__init__(buffer_size, _without_elements(observation_space), action_space, *args, **kwargs)
        self.observation_space = observation_space
        self.obs_shape = get_obs_shape(observation_space)  # type: ignore[assignment]
        self._create_stores()

    def to_torch(self, array: npt.NDArray[Any], copy: bool = True) -> th.Tensor:
        tensor = OutputPool.to_tensor(array, self.device)
        if tensor is None and not copy and self.device.type == "cpu":
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
            payload=sum(store.frames.arena.live_bytes for store in stores),
            references=sum(store.frames.reference_bytes for store in stores),
            index=sum(store.frames.index_bytes + round(filled * sum(map(_nbytes, store.ends))) for store in stores),
            fields=round(filled * fields),
            raw_equivalent=round(filled * fields) + transitions * raw,
        )

    def _create_stores(self) -> None:
        parts = {SINGLE: self.observation_space}
        if isinstance(self.observation_space, spaces.Dict):
            parts = dict(self.observation_space.spaces)
        for key, space in parts.items():
            is_image = is_image_space(space, check_channels=False, normalized_image=False)
            self._stores[key] = ObservationStore(
                self.buffer_size,
                self.n_envs,
                get_obs_shape(space),  # type: ignore[arg-type]
                np.dtype(space.dtype),
                self._config,
                n_columns=self._n_columns,
                outputs=self._outputs,
                as_float=self.output_dtype == "float" or (self.normalize_images and is_image),
                divisor=255.0 if self.normalize_images and is_image else 1.0,
            )

    def _column(self, column: int, shift: int = 0) -> Any:
        """A column of all stores, as SB3 expects it: an array, or a dict of arrays."""
        arrays = {key: ObservationArray(store, column, shift, self.device) for key, store in self._stores.items()}
        return arrays if isinstance(self.observation_space, spaces.Dict) else arrays[SINGLE]


class DummyCls:
    """Stands in for a buffer class that is not wanted.

    For instance: ``DQN.load(path, custom_objects={"replay_buffer_class": DummyCls})``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def _nbytes(array: npt.NDArray[Any]) -> int:
    return array.nbytes


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
