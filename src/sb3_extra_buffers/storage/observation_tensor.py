"""Columns of an observation store as tensors, for libraries that store their data in tensors.

An :class:`ObservationTensor` holds no values. It knows which *rows* of which store it consists of. So slicing costs
nothing, and any other operation first decodes the rows that it needs::

    row          0             1             2             3            ...
    is in        slot 0,       slot 0,       slot 1,       slot 1,      ...   with two environments
                 environment 0 environment 1 environment 0 environment 1
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th
from torch.utils._pytree import tree_map

from sb3_extra_buffers.storage.base_store import CPU, BaseStore
from sb3_extra_buffers.storage.observation_array import as_array

_aten = th.ops.aten
_Write = tuple[int, npt.NDArray[np.int64], npt.NDArray[Any]]
_Views = tuple[Callable[[th.Tensor], th.Tensor], ...]
_COMPARED_ROWS = 4
"""How many rows to compare to tell whether next observations are the observations of the next rows."""


class TensorColumns:
    """The columns of a store as one or two tensors, which are written together."""

    def __init__(self, store: BaseStore) -> None:
        self.store = store
        n_rows = store.n_slots * store.n_envs
        self.all_rows = th.arange(n_rows, dtype=th.int32 if n_rows < 1 << 31 else th.int64)
        self._waiting: list[_Write] | None = None

    def column(self, number: int, shape: Sequence[int]) -> ObservationTensor:
        """A column as a tensor. ``shape`` is that of its rows."""
        rows = self.all_rows[: int(np.prod(shape))].reshape(tuple(shape))
        return ObservationTensor(self, number, rows)

    def read(self, columns: Sequence[int], rows: th.Tensor) -> list[th.Tensor]:
        """Read the same rows of several columns. Frames that they share are decoded once."""
        slots, envs = self._places(rows)
        found = self.store.read([(column, slots.copy()) for column in columns], envs, CPU)
        return [th.from_numpy(array).reshape((*rows.shape, *self.store.shape)) for array in found]

    def write(self, column: int, rows: th.Tensor, values: th.Tensor) -> None:
        """Overwrite rows of a column."""
        values = values.detach().to(CPU).expand((*rows.shape, *self.store.shape))
        array = values.reshape((-1, *self.store.shape)).numpy()
        write = column, rows.reshape(-1).numpy().astype(np.int64), array
        if self._waiting is not None:
            self._waiting.append(write)
        else:
            self._write([write[0]], write[1], [write[2]])

    @contextmanager
    def together(self) -> Iterator[None]:
        """Store rows of both columns that are written in this context step by step, not column by column.

        Then each next observation is followed by the equal observation of the next step, and both share their frames.
        """
        waiting: list[_Write] = []
        self._waiting = waiting
        try:
            yield
        finally:
            self._waiting = None
        numbers, rows, values = zip(*waiting, strict=True) if waiting else ((), (), ())
        if numbers == (0, 1) and np.array_equal(*rows) and _is_next(*values):
            self._write([0, 1], rows[0], values)
        else:
            for column, places, array in waiting:
                self._write([column], places, [array])

    def _places(self, rows: th.Tensor | npt.NDArray[np.int64]) -> Any:
        flat = rows.reshape(-1).numpy() if isinstance(rows, th.Tensor) else rows
        return np.divmod(flat.astype(np.int64), self.store.n_envs)

    def _write(self, columns: Sequence[int], rows: npt.NDArray[np.int64], values: Sequence[npt.NDArray[Any]]) -> None:
        store = self.store
        slots, envs = self._places(rows)
        # A step ends where the slot changes, or an environment comes a second time.
        ends = np.flatnonzero((np.diff(slots) != 0) | (np.diff(envs) <= 0)) + 1
        for first, stop in zip([0, *ends.tolist()], [*ends.tolist(), len(rows)], strict=True):
            if first == stop:
                continue
            lanes = None if stop - first == store.n_envs else envs[first:stop]
            step = [store.checked(array[first:stop], stop - first) for array in values]
            slot = int(slots[first])
            with store.lock.held:
                store.prepare(len(step), slot if columns[0] == 0 else None)
                store.place([(column, slot) for column in columns], store.append(step, lanes), lanes)
                if columns[0] == 0:
                    store.finish_step()

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self.store}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["store"])  # type: ignore[misc]


def _is_next(observations: npt.NDArray[Any], following: npt.NDArray[Any]) -> bool:
    """Whether next observations are those of the next rows, judged by some rows. With n-step returns, they are not."""
    n = len(observations)
    if n == 1:
        return True
    chosen = np.unique(np.linspace(0, n - 2, min(n - 1, _COMPARED_ROWS), dtype=np.int64))
    return any(np.array_equal(following[i], observations[i + 1], equal_nan=True) for i in chosen.tolist())


class ObservationTensor(th.Tensor):
    """A tensor whose values are in a store. Views of it are of this class, too; other operations return plain tensors.

    As with any tensor, writing to a view changes the whole.
    """

    _columns: TensorColumns
    _number: int
    _rows: th.Tensor
    """The rows that it shows, in the shape of its first dimensions."""
    _views: _Views
    """The view operations that turn these rows into this tensor, if it shows parts of observations."""

    # Everything goes through __torch_dispatch__.
    __torch_function__ = th._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        columns: TensorColumns,
        number: int,
        rows: th.Tensor,
        views: _Views = (),
        like: th.Tensor | None = None,
    ) -> ObservationTensor:
        """
        :param like: A tensor with the shape, strides and dtype that result from ``views``.
        """
        if like is None:
            dtype = th.from_numpy(np.zeros(0, columns.store.dtype)).dtype
            like = th.empty((*rows.shape, *columns.store.shape), dtype=dtype, device="meta")
        made: ObservationTensor = th.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=CPU
        )
        made._columns, made._number, made._rows, made._views = columns, number, rows, views
        return made

    def decoded(self) -> th.Tensor:
        """The values, in a new tensor."""
        return decode([self])[0]

    def numpy(self, *, force: bool = False) -> npt.NDArray[Any]:
        return self.decoded().numpy()

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return as_array(self.numpy, dtype, copy)

    def tolist(self) -> Any:
        return self.decoded().tolist()

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, {self._columns.store.label!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> th.Tensor:
        rebuild, arguments = self.__reduce_ex__(2)[:2]
        copied: th.Tensor = rebuild(*copy.deepcopy(arguments, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._views:
            return self.decoded().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return ObservationTensor, (self._columns, self._number, self._rows.clone())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func.is_view and isinstance(args[0], ObservationTensor):
            return args[0]._view(func, args[1:], kwargs)
        whole = args[0]
        if isinstance(whole, ObservationTensor) and not whole._views:
            if func is _aten.index.Tensor and (rows := whole._indexed(args[1])) is not None:
                chosen = ObservationTensor(whole._columns, whole._number, rows)
                return chosen if _decoding.is_deferred else chosen.decoded()
            if func is _aten.copy_.default:
                whole._write(whole._rows, args[1])
                return whole
            accumulates = len(args) > 3 or kwargs
            if func is _aten.index_put_.default and not accumulates and (rows := whole._indexed(args[1])) is not None:
                whole._write(rows, args[2])
                return whole
        return _on_values(func, args, kwargs)

    def _viewed(self, values: th.Tensor) -> th.Tensor:
        for view in self._views:
            values = view(values)
        return values

    def _write(self, rows: th.Tensor, values: th.Tensor) -> None:
        self._columns.write(self._number, rows, _values(values).to(self.dtype))

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        like = func(th.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta"), *args, **kwargs)
        rows = None if self._views else self._viewed_rows(func, args, kwargs, like)
        if isinstance(like, th.Tensor):
            if rows is not None:
                return ObservationTensor(self._columns, self._number, rows)
            views = (*self._views, lambda whole: func(whole, *args, **kwargs))
            return ObservationTensor(self._columns, self._number, self._rows, views, like)
        if rows is not None:
            return type(like)(ObservationTensor(self._columns, self._number, part) for part in rows)

        def part_of(i: int) -> Callable[[th.Tensor], th.Tensor]:
            return lambda whole: func(whole, *args, **kwargs)[i]

        return type(like)(
            ObservationTensor(self._columns, self._number, self._rows, (*self._views, part_of(i)), part)
            for i, part in enumerate(like)
        )

    def _viewed_rows(self, func: Any, args: Any, kwargs: Any, like: Any) -> Any:
        """The rows of a view that consists of whole observations, or ``None`` if it does not, or may not."""
        n_item, rows = len(self._columns.store.shape), self._rows
        if func in (_aten.alias.default, _aten.detach.default):
            return rows
        if func in _ALONG_ONE_DIMENSION:
            names = [argument.name for argument in func._schema.arguments[1:]]
            named = {"dim": 0, **dict(zip(names, args, strict=False)), **kwargs}
            n_dims = self.ndim + (func is _aten.unsqueeze.default)
            named["dim"] %= n_dims
            return func(rows, **named) if named["dim"] < n_dims - n_item else None
        if func is _aten.transpose.int:
            dims = [dim % self.ndim for dim in args]
            return func(rows, *dims) if max(dims) < rows.ndim else None
        if func in _TO_A_SHAPE:
            lead, item = like.shape[: like.ndim - n_item], like.shape[like.ndim - n_item :]
            is_whole = like.ndim >= n_item and item == self.shape[self.ndim - n_item :]
            if is_whole and func is _aten.expand.default:
                return rows.expand(lead)
            if is_whole and lead.numel() == rows.numel():
                return rows.reshape(lead)
        return None

    def _indexed(self, indices: Any) -> th.Tensor | None:
        """The rows at ``indices``, or ``None`` if those reach into observations."""
        n_used = sum(1 if index is None or index.dtype != th.bool else index.ndim for index in indices)
        if n_used > self._rows.ndim:
            return None
        rows: th.Tensor = _aten.index.Tensor(self._rows, indices)
        return rows


class _Decoding(threading.local):
    is_deferred = False


_decoding = _Decoding()


@contextmanager
def deferred_decoding() -> Iterator[None]:
    """Do not decode rows that are selected by index in this context: :func:`decode` can then decode them together."""
    _decoding.is_deferred = True
    try:
        yield
    finally:
        _decoding.is_deferred = False


def decode(tensors: Sequence[ObservationTensor]) -> list[th.Tensor]:
    """The values of several tensors. The same rows of two columns are decoded together."""
    found: dict[int, th.Tensor] = {}
    for i, tensor in enumerate(tensors):
        if i in found:
            continue
        same = [
            j
            for j, other in enumerate(tensors)
            if j == i or (other._columns is tensor._columns and j > i and th.equal(other._rows, tensor._rows))
        ]
        numbers = sorted({tensors[j]._number for j in same})
        values = dict(zip(numbers, tensor._columns.read(numbers, tensor._rows), strict=True))
        found.update((j, tensors[j]._viewed(values[tensors[j]._number])) for j in same)
    return [found[i] for i in range(len(tensors))]


def _values(value: Any) -> Any:
    return value.decoded() if isinstance(value, ObservationTensor) else value


def _on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on decoded tensors, and store the tensors that it changed."""
    changed: list[tuple[ObservationTensor, th.Tensor]] = []

    def whole(tensor: Any) -> Any:
        if not isinstance(tensor, ObservationTensor):
            return tensor
        (values,) = tensor._columns.read([tensor._number], tensor._rows)
        changed.append((tensor, values))
        return tensor._viewed(values)

    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments]
    names = {argument.name: is_write for argument, is_write in zip(func._schema.arguments, written, strict=True)}
    plain_args = [tree_map(whole if is_write else _values, arg) for arg, is_write in zip(args, written, strict=False)]
    plain_kwargs = {name: tree_map(whole if names[name] else _values, value) for name, value in kwargs.items()}
    result = func(*plain_args, **plain_kwargs)
    for tensor, values in changed:
        tensor._columns.write(tensor._number, tensor._rows, values)
    return args[0] if changed and isinstance(args[0], ObservationTensor) else kwargs.get("out", result)


_ALONG_ONE_DIMENSION = {
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.unsqueeze.default,
    _aten.unbind.int,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
}
_TO_A_SHAPE = {_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.expand.default}
