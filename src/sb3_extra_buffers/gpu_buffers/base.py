"""The base class of buffers on a torch device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.utils import get_device

from sb3_extra_buffers.codecs.availability import has_numba
from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.codecs.registry import parse_method
from sb3_extra_buffers.compatibility.device import as_numpy_dtypes
from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from sb3_extra_buffers.compressed.rows import map_parts
from sb3_extra_buffers.errors import ConfigurationError, OptionError, UnknownMethodError
from sb3_extra_buffers.gpu_buffers.arena import HeapBudget
from sb3_extra_buffers.gpu_buffers.device_store import DeviceStore
from sb3_extra_buffers.gpu_buffers.observation_store import DenseObservationStore, PackedObservationStore
from sb3_extra_buffers.gpu_buffers.transfer import CPU, Places, Staging
from sb3_extra_buffers.storage.config import CodecRecipe

METHODS = ("none", "rle", "zstd", "delta")
_DEFAULT_FRAMES_PER_RECORD = 3
"""For ``delta``. Larger records compress better, but a GPU must decode the frames of a record one after the other."""


class normal_tensors:  # noqa: N801  # reads like a function, as contextlib's own do
    """``with normal_tensors():`` leaves inference mode, because tensors created in it cannot be modified outside."""

    __slots__ = ("_mode",)

    def __enter__(self) -> None:
        self._mode: Any = None
        if th.is_inference_mode_enabled():
            self._mode = th.inference_mode(mode=False)
            self._mode.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._mode is not None:
            self._mode.__exit__(*error)


class BaseGpuBuffer(BaseCompressedBuffer):
    """A mixin for compressed buffer classes that keeps observations on a torch device.

    It takes the arguments of the buffer class that it is combined with, except for these:

    :param compression_method: ``"none"``, ``"rle"``, ``"zstd"`` (with a level: ``"zstd-5"``) or ``"delta"``. The
        default, ``"auto"``, means ``delta`` for images and ``none`` for everything else. ``zstd`` records stay in
        host memory. So do ``rle`` and ``delta`` records on devices without Triton.
    :param buffer_device: The device that keeps the observations. By default, it is ``device``, where batches go.
    :param heap_bytes: The most memory for compressed observations, in bytes. An ``add`` that needs more raises a
        ``ValueError``, and stored transitions stay readable. By default, there is no limit.
    :param max_slot_bytes: Deprecated: use ``heap_bytes``. The same limit, given per observation.
    """

    _stores: dict[str, DeviceStore]  # type: ignore[assignment]  # this class creates no others
    _has_segments = False
    _checked_device: th.device | None = None
    """The value of ``device`` when the buffer was last moved."""
    _is_moving = False
    """Whether a move has begun and not ended. If it failed, parts of the buffer may be on either device."""
    _outputs_stay = True
    """Whether batches stay on the device that holds the observations."""
    _stream: int | None = None
    """The raw handle of the CUDA stream that last worked for this buffer."""
    _last_stream: th.cuda.Stream | None = None
    """The same stream as a torch object."""

    def __init__(
        self,
        *of_host_buffer: Any,
        compression_method: str = "auto",
        dtypes: Mapping[str, Any] | npt.DTypeLike | th.dtype | None = None,
        buffer_device: th.device | str | None = None,
        heap_bytes: int | None = None,
        max_slot_bytes: int | None = None,
        **options: Any,
    ) -> None:
        method = parse_method(compression_method)
        if method.name.removesuffix("-jit") not in (*METHODS, "auto"):
            raise UnknownMethodError(
                f"Buffers on a device have the compression methods auto, {', '.join(METHODS)}, "
                f"not {compression_method!r}."
            )
        if options.get("prefer", "balanced") != "balanced":
            raise ConfigurationError(
                "prefer is for buffers in host memory. Leave it out, and choose a compression_method on a device."
            )
        if options.get("storage", "memory") != "memory":
            raise ConfigurationError("storage='mmap' is for buffers in host memory, not on a device.")
        for name, value in (("heap_bytes", heap_bytes), ("max_slot_bytes", max_slot_bytes)):
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {value}.")
        self._requested_device = None if buffer_device is None else _with_index(get_device(buffer_device))
        self._heap_bytes = heap_bytes
        self._max_slot_bytes = max_slot_bytes
        if max_slot_bytes is not None:
            warnings.warn("max_slot_bytes is deprecated: pass heap_bytes.", DeprecationWarning, stacklevel=2)
        with normal_tensors():
            super().__init__(
                *of_host_buffer, compression_method=compression_method, dtypes=as_numpy_dtypes(dtypes), **options
            )

    @property
    def buffer_device(self) -> th.device:
        """The device that keeps the observations, at the latest from the next ``add`` or ``sample`` on."""
        requested = _with_index(th.device(self.device)) if self._requested_device is None else self._requested_device
        if requested.type == "cuda" and not th.cuda.is_available():
            return CPU  # saved on a machine with a GPU, loaded on one without
        return requested

    @property
    def device_bytes(self) -> int:
        """The device memory that this buffer has allocated, in bytes, whether in use or not."""
        with self._lock.held:
            return sum(tensor.nbytes for tensor in self._device_tensors())

    def to(self, device: th.device | str) -> BaseGpuBuffer:
        """Move all stored data to ``device``, and return batches there from now on."""
        with self._lock.held, normal_tensors():
            self.device = get_device(device)
            self._requested_device = None
            self._checked_device = None
            self._move_to_requested_device()
        return self

    def _arguments(self) -> dict[str, Any]:
        return {
            **super()._arguments(),
            "buffer_device": None if self._requested_device is None else str(self._requested_device),
            "heap_bytes": self._heap_bytes,
            "max_slot_bytes": self._max_slot_bytes,
        }

    def _create_stores(self) -> None:
        self._location = self.buffer_device
        self._staging: dict[th.dtype, Staging] = {}
        self._move_to_requested_device()
        heap_bytes = self._heap_bytes
        if heap_bytes is None and self._max_slot_bytes is not None:
            n_keys = len(self.observation_space) if isinstance(self.observation_space, spaces.Dict) else 1
            heap_bytes = self._max_slot_bytes * self.buffer_size * self.n_envs * self._n_columns * n_keys
        self._budget = HeapBudget(heap_bytes)
        super()._create_stores()

    def _make_store(self, key: str, is_image: bool, **arguments: Any) -> DeviceStore:
        recipe = _recipe_for(self._config.recipe, is_image)
        config = replace(self._config, recipe=recipe)
        is_packed = recipe.method.name != "none" and math.prod(arguments["shape"]) > 0
        kind = PackedObservationStore if is_packed else DenseObservationStore
        return kind(config=config, device=self._location, budget=self._budget, **arguments)

    def _move_to_requested_device(self) -> None:
        """Move the buffer if its device has changed: SB3 assigns ``device`` after loading a buffer."""
        location = self.buffer_device
        if location != self._location or self._is_moving:
            self._is_moving = True
            for store in self._stores.values():
                store.to(location)
            self._move_fields(location)
            self._location, self._stream, self._last_stream, self._staging = location, None, None, {}
            self._is_moving = False
        self._outputs_stay = self._location == _with_index(th.device(self.device))
        self._checked_device = self.device

    def _follow_device(self) -> None:
        """Move the buffer if :attr:`device` was changed, and switch to the current CUDA stream."""
        if self._checked_device is not self.device:
            self._move_to_requested_device()
        if self._location.type == "cuda":
            current = th._C._cuda_getCurrentRawStream(self._location.index)
            if current != self._stream:
                self._change_stream(current)

    def _places(self, slots: list[Indices], envs: Indices) -> Places:
        """Send the slots and environments of a batch to the device."""
        return Places(slots, envs, self._location, self._staging_for((len(slots) + 1) * len(envs), th.int64))

    def _staging_for(self, row_size: int, dtype: th.dtype) -> Staging:
        """Pinned memory to send up to ``row_size`` elements from. It is kept for the next batches."""
        staging = self._staging.get(dtype)
        if staging is None or staging.row_size < row_size:
            self._staging[dtype] = staging = Staging(row_size, dtype, self._location)
        return staging

    def _move_fields(self, location: th.device) -> None:
        """Move everything except observations to ``location``."""

    def _change_stream(self, raw: int) -> None:
        """Switch to the current stream, and let it wait for the previous one."""
        current = th.cuda.current_stream(self._location)
        if self._last_stream is not None:
            current.wait_stream(self._last_stream)
        self._stream, self._last_stream = raw, current
        # If one of these is freed, torch's allocator must not reuse its memory before this stream is done with it.
        for tensor in self._device_tensors():
            tensor.record_stream(current)

    def check_device(self) -> None:
        """Raise :class:`~sb3_extra_buffers.errors.CorruptDataError` if the device does not hold what it should.

        It sends and moves no observations, so the check cannot repair what it looks for.
        """
        with self._lock.held:
            for store in self._stores.values():
                store.check_device()

    def _device_tensors(self) -> list[th.Tensor]:
        """Everything on the device that kernels read or write."""
        of_stores = [tensor for store in self._stores.values() for tensor in store.device_tensors()]
        return [*of_stores, *(staging.sent for staging in self._staging.values())]

    _rebuilt: ClassVar[tuple[str, ...]] = (
        "_stream",
        "_last_stream",
        "_location",
        "_checked_device",
        "_is_moving",
        "_outputs_stay",
        "_budget",
        "_fields",
        "_staging",
    )

    def _arguments_to_unpickle(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {**arguments, "buffer_device": None}  # it is saved as the attribute _requested_device

    def _to_device(self, tensors: Any) -> Any:
        """Move a tensor, or each tensor of a dict, to :attr:`device`."""
        return map_parts(lambda tensor: tensor.to(self.device), tensors)


def _recipe_for(given: CodecRecipe | None, is_image: bool) -> CodecRecipe:
    """The method and options that the user has chosen, completed with the defaults of GPU buffers."""
    recipe = given or CodecRecipe(parse_method("delta" if is_image else "none"))
    method, options = recipe.method, dict(recipe.options)
    if options.get("indexed_colour"):
        raise OptionError("indexed_colour is for buffers in host memory. Leave it out of compression_kwargs.")
    if method.name == "delta":
        options.setdefault("frames_per_record", _DEFAULT_FRAMES_PER_RECORD)
    elif method.name == "rle" and has_numba():
        method = parse_method("rle-jit")  # the same bytes, faster
    return CodecRecipe(method, options)


def _with_index(device: th.device) -> th.device:
    """Replace ``cuda`` by the current GPU, such as ``cuda:0``."""
    if device.type == "cuda" and device.index is None and th.cuda.is_available():
        return th.device("cuda", th.cuda.current_device())
    return device
