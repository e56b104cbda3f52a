"""A storage for TorchRL's replay buffers that compresses images."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from torch.utils._pytree import tree_leaves, tree_map

from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError
from sb3_extra_buffers.persistence import container
from sb3_extra_buffers.persistence.container import Container
from sb3_extra_buffers.persistence.files import as_corrupt, flat
from sb3_extra_buffers.state import SavedState, decode_dtype
from sb3_extra_buffers.storage.config import FrameStack, Preference, StorageConfig
from sb3_extra_buffers.storage.observation_store import ObservationStore
from sb3_extra_buffers.storage.observation_tensor import ObservationTensor, TensorColumns, decode, deferred_decoding
from sb3_extra_buffers.storage.usage import MemoryUsage

require("torchrl", "CompressedStorage", "torchrl")

from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection  # noqa: E402
from torchrl.data import LazyTensorStorage  # noqa: E402
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase  # noqa: E402

__all__ = ["CompressedStorage"]

Key = tuple[str, ...]
_DTYPES = {th.bool, th.uint8, th.int8, th.int16, th.int32, th.int64, th.float16, th.float32, th.float64}
_SMALLEST_IMAGE = 256
"""The smallest entry, in bytes per row, that is compressed by default. Smaller ones would gain nothing."""
_COMPRESSED, _DENSE = "compressed", "dense"
"""In a folder that ``dumps()`` writes: the file of compressed entries, and the folder of all others."""
_CHUNK = 256
"""How many rows of another storage are converted at once."""


class _Checkpointer(StorageCheckpointerBase):  # type: ignore[misc]  # TorchRL has no types
    """Saves and loads a storage for ``dumps()`` and ``loads()`` of TorchRL's buffers."""

    def dumps(self, storage: CompressedStorage, path: str | Path) -> None:
        path = Path(path)
        if not storage.initialized:
            raise RuntimeError("Cannot save a storage that nothing was written to.")
        if self._save_hooks:
            raise NotImplementedError("CompressedStorage does not support save hooks: register none.")
        path.mkdir(parents=True, exist_ok=True)
        storage._dense().memmap(path / _DENSE, copy_existing=True)
        container.write(path / _COMPRESSED, *storage._packed())

    def loads(self, storage: CompressedStorage, path: str | Path) -> None:
        path = Path(path)
        if (path / _COMPRESSED).exists():
            with Container.open(path / _COMPRESSED) as file, as_corrupt(path):
                storage._restore(TensorDict.load_memmap(path / _DENSE).clone(), file)
                storage._len = SavedState(file, file.meta["state"]).integer("len", 0, storage.max_size)
            return
        saved = json.loads((path / "storage_metadata.json").read_text())  # what LazyTensorStorage writes
        if saved["is_pytree"]:
            raise NotImplementedError(f"{path} holds no TensorDict, and CompressedStorage loads nothing else.")
        storage._convert(TensorDict.load_memmap(path), saved["len"])
        storage._len = saved["len"]


class CompressedStorage(LazyTensorStorage):  # type: ignore[misc]
    """Like TorchRL's ``LazyTensorStorage``, with the same values in a fraction of the memory.

    Images are compressed. Frames that several observations share are stored once: those of a frame stack, and those of
    ``("next", key)``, which nearly always equals ``key`` of the next step. All other entries are plain tensors.

    As with ``LazyTensorStorage``, ``storage[:]`` and all other slices are views. Their images are decoded on access.

    :param max_size: The capacity in rows.
    :param ndim: The number of leading dimensions that index rows, as in ``LazyTensorStorage``: 2 for time and
        environments.
    :param n_envs: With ``ndim=1``, if consecutive rows come from several environments in turn: their number.
    :param keys: The entries to compress. By default all images: those of type uint8 with at least two dimensions, and
        those of other types with at least three.
    :param compression_method: See ``docs/choosing.md``.
    :param compression_kwargs: Options of the method.
    :param frame_stack: The number of frames that an observation stacks; ``"auto"`` detects it.
    :param prefer: What the method ``"auto"`` optimizes: ``"speed"``, ``"balanced"`` or ``"memory"``.
    :param verify: Keep a checksum of every observation, and compare it whenever the observation is read.
    """

    _default_checkpointer = _Checkpointer
    _storage: Any
    max_size: int

    def __init__(
        self,
        max_size: int,
        *,
        device: th.device | str = "cpu",
        ndim: int = 1,
        n_envs: int = 1,
        keys: Sequence[str | Key] | None = None,
        compression_method: str = "auto",
        compression_kwargs: Mapping[str, Any] | None = None,
        frame_stack: FrameStack = "auto",
        prefer: Preference = "balanced",
        verify: bool = False,
    ) -> None:
        if th.device(device).type != "cpu":
            raise ConfigurationError(
                f"CompressedStorage holds its data in host memory, not on {device}. Leave device out, and move batches "
                f"with buffer.append_transform(lambda batch: batch.to({str(device)!r}))."
            )
        if n_envs < 1 or (n_envs > 1 and ndim > 1):
            raise ConfigurationError(
                f"n_envs must be at least 1, and 1 if ndim is above 1, not {n_envs} with ndim={ndim}."
            )
        super().__init__(max_size, ndim=ndim)
        self._config = StorageConfig.from_arguments(
            compression_method, None, compression_kwargs, None, frame_stack, prefer
        )
        self._n_envs = n_envs
        self._verify = verify
        self._wanted = None if keys is None else [_as_key(key) for key in keys]
        self._compressed: list[tuple[list[Key], TensorColumns]] = []
        """For each store: the keys of its entries, and their columns. A key and its ``next`` can share a store."""
        self._writing: ExitStack | None = None

    def memory_usage(self) -> MemoryUsage:
        """The memory that the current contents take, by kind."""
        stores = {".".join(keys[0]): columns.store for keys, columns in self._compressed}
        filled = len(self) / self.max_size
        dense = sum(leaf.nbytes for leaf in self._leaves() if not isinstance(leaf, ObservationTensor))
        raw = sum(leaf.nbytes for leaf in self._leaves())
        return MemoryUsage.of_stores(stores, filled, len(self), round(filled * dense), round(filled * raw))

    def check(self) -> None:
        """Check all invariants, as ``CompressedReplayBuffer.check()`` does."""
        for _, columns in self._compressed:
            columns.store.check()

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        with ExitStack() as self._writing:
            try:
                for _, columns in self._compressed:
                    self._writing.enter_context(columns.together())
                super().set(cursor, data, set_cursor=set_cursor)
            finally:
                self._writing = None

    def get(self, index: Any) -> Any:
        if _is_view(index):
            return super().get(index)
        with deferred_decoding():
            found = super().get(index)
        if isinstance(found, ObservationTensor):
            return found.decoded()
        if is_tensor_collection(found):
            entries = [(key, found.get(key)) for keys, _ in self._compressed for key in keys]
            for (key, _), values in zip(entries, decode([entry for _, entry in entries]), strict=True):
                found.set(key, values)
            return found
        return tree_map(_decoded, found)

    def _leaves(self) -> Iterator[Any]:
        if self.initialized and is_tensor_collection(self._storage):
            leaves = self._storage.values(include_nested=True, leaves_only=True)
        else:
            leaves = tree_leaves(self._storage)
        return (leaf for leaf in leaves if isinstance(leaf, th.Tensor))

    def _init(self, data: Any) -> None:
        is_td = is_tensor_collection(data)
        inner = (data if is_td else tree_leaves(data)[0]).shape[: self.ndim - 1]
        n_rows = -(-self.max_size // inner.numel())
        lead = (n_rows, *inner)
        if self._wanted is not None and not is_td:
            raise ConfigurationError(f"keys={self._wanted} needs data in TensorDicts, not in a {type(data).__name__}.")
        self._compressed = []
        storage: Any
        if is_td:
            keys = self._image_keys(data)
            data, given = data.clone(recurse=False), data
            for key in keys:
                data.set(key, th.empty(data.shape, dtype=th.bool))  # a placeholder, to keep the order of entries
            storage = th.empty_like(data.to("cpu").expand(n_rows, *data.shape))
            for group in _groups(given, keys):
                columns = self._new_columns(group, *self._shape_and_dtype(given.get(group[0])), lead)
                for number, key in enumerate(group):
                    storage.set(key, columns.column(number, lead))
        else:
            storage = tree_map(lambda leaf: self._column_or_tensor(leaf, lead), data)
        self._storage = storage
        self.max_size = math.prod(lead)
        self.initialized = True

    def _image_keys(self, data: Any) -> list[Key]:
        if isinstance(data, LazyStackedTensorDict):  # its rows may differ in shape
            if self._wanted is not None:
                raise ConfigurationError(
                    f"keys={self._wanted} needs rows of one shape, which a LazyStackedTensorDict may not have. Pass "
                    "data.contiguous() if its rows have, or leave keys out: then nothing in it is compressed."
                )
            return []
        found = {
            _as_key(key): value
            for key, value in data.items(include_nested=True, leaves_only=True)
            if isinstance(value, th.Tensor)
        }
        if self._wanted is None:
            return [key for key, value in found.items() if self._is_image(value)]
        for key in self._wanted:
            if key not in found or found[key].dtype not in _DTYPES:
                raise ConfigurationError(
                    f"keys has {key}, which is no tensor of numbers in the data. Its tensors are {sorted(found)}."
                )
        return self._wanted

    def _is_image(self, row: th.Tensor) -> bool:
        n_dims = row.ndim - (self.ndim - 1)
        is_large = row[(0,) * (self.ndim - 1)].nbytes >= _SMALLEST_IMAGE
        return is_large and row.dtype in _DTYPES and n_dims >= (2 if row.dtype == th.uint8 else 3)

    def _column_or_tensor(self, row: th.Tensor, lead: tuple[int, ...]) -> th.Tensor:
        if not self._is_image(row):
            return th.empty(lead[:1] + row.shape, dtype=row.dtype)
        return self._new_columns([()], *self._shape_and_dtype(row), lead).column(0, lead)

    def _shape_and_dtype(self, row: th.Tensor) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """The shape of a single observation, and its dtype in NumPy."""
        return tuple(row.shape[self.ndim - 1 :]), th.empty(0, dtype=row.dtype).numpy().dtype

    def _new_columns(
        self, keys: list[Key], shape: tuple[int, ...], dtype: np.dtype[Any], lead: tuple[int, ...]
    ) -> TensorColumns:
        n_envs = math.prod(lead[1:]) * self._n_envs
        n_slots = -(-math.prod(lead) // n_envs)
        store = ObservationStore(n_slots, n_envs, shape, dtype, self._config, len(keys), verify=self._verify)
        columns = TensorColumns(store)
        self._compressed.append((keys, columns))
        if self._writing is not None:
            self._writing.enter_context(columns.together())
        return columns

    def _empty(self) -> None:
        super()._empty()
        for _, columns in self._compressed:
            columns.store.clear()

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise RuntimeError(
                "A CompressedStorage cannot be shared between processes: its stores are not in shared memory. Create "
                "the buffer in the process that uses it, or use LazyMemmapStorage."
            )
        state: dict[str, Any] = super().__getstate__()
        return state

    def state_dict(self) -> dict[str, Any]:
        """Like that of ``LazyTensorStorage``, but with all images in one tensor of compressed bytes."""
        # "_storage" is None, so that other storages refuse this dict instead of loading only a part of it.
        state: dict[str, Any] = {"_storage": None, "initialized": self.initialized, "_len": self._len}
        if self.initialized:
            state["_dense"] = self._dense().state_dict()
            state["_compressed"] = th.frombuffer(bytearray(container.pack(*self._packed())), dtype=th.uint8)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this class, or of ``LazyTensorStorage``."""
        length = state_dict["_len"]
        if not state_dict["initialized"]:
            self._empty()
        elif "_compressed" in state_dict:
            packed = state_dict["_compressed"].numpy().tobytes()
            template = self._dense() if self.initialized else TensorDict()
            file = container.unpack(packed, "The state dict")
            self._restore(template.load_state_dict(state_dict["_dense"], strict=False).clone(), file)
        else:
            rows = state_dict["_storage"]
            is_tensor = isinstance(rows, th.Tensor)
            self._convert(rows if is_tensor else TensorDict().load_state_dict(rows, strict=False), length)
        self._len = length
        self._bump_mutation_revision()

    def _dense(self) -> Any:
        """All entries that are not compressed, as a TensorDict."""
        if is_tensor_collection(self._storage):
            return self._storage.exclude(*(key for keys, _ in self._compressed for key in keys))
        if isinstance(self._storage, ObservationTensor):
            return TensorDict()
        if isinstance(self._storage, th.Tensor):
            return TensorDict({"tensor": self._storage})
        raise TypeError(f"Only TensorDicts and tensors can be saved, not a {type(self._storage).__name__} of them.")

    def _packed(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The JSON and the arrays of all compressed entries, for a container."""
        stores = {
            str(i): {
                "keys": [list(key) for key in keys],
                "shape": list(columns.store.shape),
                "dtype": columns.store.dtype.str,
                "store": columns.store.state(),
            }
            for i, (keys, columns) in enumerate(self._compressed)
        }
        plain, arrays = flat({"len": self._len, "lead": list(self._total_shape), "stores": stores})
        return {"class": type(self).__name__, "state": plain}, arrays

    def _restore(self, dense: Any, file: Container) -> None:
        state = SavedState(file, file.meta["state"])
        lead = tuple(state.value("lead"))
        if len(lead) != self.ndim or -(-self.max_size // math.prod(lead[1:])) != lead[0]:
            raise ConfigurationError(
                f"The saved storage has {math.prod(lead)} rows of shape {lead}. This one has max_size={self.max_size} "
                f"and ndim={self.ndim}: create it with max_size={math.prod(lead)} and ndim={len(lead)}."
            )
        self._compressed = []
        for part in state.part("stores").parts():
            keys = [tuple(key) for key in part.value("keys")]
            if not all(keys) and len(keys) > 1:
                raise CorruptDataError(f"{file.path} is corrupt: its keys are {keys}.")
            columns = self._new_columns(keys, tuple(part.value("shape")), decode_dtype(part.value("dtype")), lead)
            columns.store.restore(part.part("store"))
            for number, key in enumerate(keys):
                column = columns.column(number, lead)
                dense = dense.set(key, column) if key else column
        self._storage = dense["tensor"] if is_tensor_collection(dense) and list(dense.keys()) == ["tensor"] else dense
        self.max_size = math.prod(lead)
        self.initialized = True

    def _convert(self, data: Any, length: int) -> None:
        """Copy and compress the rows of another storage."""
        n_rows = -(-length // data.shape[1 : self.ndim].numel())
        self._empty()
        for first in range(0, n_rows, _CHUNK):
            rows = th.arange(first, min(first + _CHUNK, n_rows))
            self.set(rows, data[first : first + len(rows)], set_cursor=False)


def _as_key(key: str | Key) -> Key:
    return (key,) if isinstance(key, str) else tuple(key)


def _is_view(index: Any) -> bool:
    """Whether ``tensor[index]`` is a view of several rows."""
    parts = index if isinstance(index, tuple) else (index,)
    has_slice = any(isinstance(part, slice) for part in parts)
    return has_slice and all(part is None or part is Ellipsis or isinstance(part, slice | int) for part in parts)


def _groups(data: Any, keys: list[Key]) -> list[list[Key]]:
    """Group the keys that share a store: a key and its ``next``, if their shapes and dtypes are equal."""
    groups: dict[Key, list[Key]] = {}
    for key in keys:
        before = key[1:]
        is_pair = key[0] == "next" and before in keys and _is_alike(data.get(before), data.get(key))
        groups.setdefault(before if is_pair else key, []).append(key)
    return [sorted(group, key=len) for group in groups.values()]


def _is_alike(row: th.Tensor, other: th.Tensor) -> bool:
    return row.shape == other.shape and row.dtype == other.dtype


def _decoded(leaf: Any) -> Any:
    return leaf.decoded() if isinstance(leaf, ObservationTensor) else leaf
