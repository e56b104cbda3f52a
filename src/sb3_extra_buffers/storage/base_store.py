"""The base class of all observation stores: shapes, dtypes, checks of the input, and checksums."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.errors import ObservationError
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.config import StorageConfig, cast, saturate
from sb3_extra_buffers.storage.digests import Digests, ObservationDigests, digests_of
from sb3_extra_buffers.storage.locking import BufferLock
from sb3_extra_buffers.storage.outputs import OutputPool
from sb3_extra_buffers.storage.pickling import Pickled, arguments_of, unpickled

CPU = th.device("cpu")
MakeZeros = Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]


class BaseStore(ABC):
    """The observations of one space, or of one key of a Dict space. A store replaces the observation arrays of SB3.

    It has one or more *columns* of ``n_slots`` × ``n_envs`` places. A replay buffer has two: observations and next
    observations. A place that was never written reads as zeros, as in SB3.

    An observation is written in three parts: :meth:`prepare` does all that can fail, :meth:`append` stores the
    observation where no slot refers to it yet, and :meth:`place` puts it into a slot. An interruption in between leaves
    all stored observations readable.

    :param as_float: Return float32, whatever the dtype of the space.
    :param divisor: Observations are divided by this number when they are read: 255 for images that SB3 normalizes.
    :param verify: Keep a checksum of every observation, and compare it when the observation is read.
    :param lock: Threads must hold it to change or read the store. By default, the store has its own.
    """

    def __init__(
        self,
        n_slots: int,
        n_envs: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        config: StorageConfig,
        n_columns: int = 1,
        outputs: OutputPool | None = None,
        as_float: bool = False,
        divisor: float = 1.0,
        make_zeros: MakeZeros = np.zeros,
        verify: bool = False,
        lock: BufferLock | None = None,
    ) -> None:
        self.n_slots = n_slots
        self.n_envs = n_envs
        self.shape = shape
        self.dtype = dtype
        self.config = config
        self.n_columns = n_columns
        self.stored_dtype = config.stored_dtype(dtype)
        self.outputs = outputs or OutputPool()
        self.output_dtype = np.dtype(np.float32) if as_float else dtype
        self.divisor = divisor
        self.lock = lock or BufferLock()
        self.digests = ObservationDigests(n_columns, n_slots, n_envs, make_zeros) if verify else None
        self.choice = ""
        """What ``auto`` measured, and why it chose the method, as text for users."""
        self.slots_used = 0
        """Slots from this one on hold no observations, so searches skip them."""
        self._make_zeros = make_zeros
        self._step_shape = (n_envs, *shape)

    @property
    @abstractmethod
    def label(self) -> str:
        """The compression method in use, as text for users."""

    @property
    @abstractmethod
    def payload_bytes(self) -> int:
        """The bytes of stored observations."""

    @property
    @abstractmethod
    def reference_bytes(self) -> int:
        """The bytes of reference frames, dictionaries, and the newest frames, which are raw."""

    @property
    def steps_until_settled(self) -> int:
        """The most steps until ``auto`` has made its planned choices; 0 if it has, or if the method was given."""
        return 0

    @abstractmethod
    def index_bytes(self, filled: float) -> int:
        """The bytes of the index that finds observations, when a share of the slots, ``filled``, is in use."""

    def checked(self, observations: npt.ArrayLike, n: int | None = None) -> npt.NDArray[Any]:
        """Return the observations of ``n`` (by default all) environments, validated and in the stored dtype."""
        array = np.asarray(observations)
        if n is None and array.shape == self._step_shape:
            pass  # the usual case
        elif array.shape != ((n := n or self.n_envs), *self.shape):
            # As in SB3, a single environment may omit its axis, and scalar observations may have any shape.
            is_single = n == 1 and array.shape == self.shape
            if not is_single and (array.size != n or math.prod(self.shape) != 1):
                raise ObservationError(
                    f"Expected observations of shape {(n, *self.shape)}, one for each of {n} environments, "
                    f"but got {array.shape}. Is the buffer's observation space that of the environment?"
                )
            array = array.reshape(n, *self.shape)
        if array.dtype != self.dtype:
            array = cast(array, self.dtype)
        if not array.flags.writeable:  # numba would compile its kernels again for read-only arrays
            array = array.copy(order="K")
        return array if array.dtype is self.stored_dtype else saturate(array, self.stored_dtype)

    def checked_pair(self, observations: npt.ArrayLike, following: npt.ArrayLike) -> Any:
        """Validate the observations and next observations of a step. The result is for :meth:`stage`."""
        return self.checked(observations), self.checked(following)

    @abstractmethod
    def stage(self, slot: int, pair: Any) -> Any:
        """Store a pair from :meth:`checked_pair`, but in no slot yet. The result is for :meth:`place_step`."""

    def place_step(self, slot: int, staged: Any) -> None:
        """Put a staged step into ``slot``. With one column, its next observations go to the slot after it.

        The call is idempotent: if Ctrl-C interrupts it, repeat it.
        """
        following = (0, (slot + 1) % self.n_slots) if self.n_columns == 1 else (1, slot)
        self.place(((0, slot), following), staged)

    def write(self, column: int, slot: int, observations: npt.NDArray[Any], lanes: Indices | None = None) -> None:
        """Store :meth:`checked` observations, one for each environment or for each of ``lanes``."""
        with self.lock.held:
            self.prepare(1, slot if column == 0 else None)
            self.place([(column, slot)], self.append([observations], lanes), lanes)
            if column == 0:
                self.finish_step()

    @abstractmethod
    def prepare(self, n_observations: int, slot: int | None = None) -> None:
        """Make room for ``n_observations`` of each environment. All that can fail happens here.

        :param slot: The slot of column 0 that is going to be overwritten, if any.
        """

    @abstractmethod
    def append(self, observations: Sequence[npt.NDArray[Any]], lanes: Indices | None = None) -> Any:
        """Store one or two :meth:`checked` observations per lane, in no slot yet. The result is for :meth:`place`."""

    @abstractmethod
    def place(self, places: Sequence[tuple[int, int]], appended: Any, lanes: Indices | None = None) -> None:
        """Put appended observations into ``(column, slot)`` places. The call is idempotent."""

    @abstractmethod
    def is_shared(self, previous: int, slot: int) -> npt.NDArray[np.bool_]:
        """Whether next observations in ``previous`` and observations in ``slot`` share storage, for each environment.

        If they do, they are equal. If they do not, they may be equal, too.
        """

    def finish_step(self) -> None:  # noqa: B027  # most stores have nothing to do
        """Called after each complete step."""

    def read(self, wanted: list[tuple[int, Indices]], envs: Indices, device: th.device = CPU) -> list[npt.NDArray[Any]]:
        """Return new arrays: for each ``(column, slots)`` in ``wanted``, the observations at ``slots[i], envs[i]``."""
        return self.converted(self.read_stored(wanted, envs, device))

    def read_raw(
        self, wanted: list[tuple[int, Indices]], envs: Indices, device: th.device = CPU
    ) -> list[npt.NDArray[Any]]:
        """The same in the dtype of their space, before any normalization."""
        return [out.astype(self.dtype, copy=False) for out in self.read_stored(wanted, envs, device)]

    def converted(self, outs: list[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """Convert observations of :meth:`read_stored` or :meth:`read_raw` to the dtype and range of batches."""
        if not self.stored_dtype == self.dtype == self.output_dtype:
            outs = [out.astype(self.dtype, copy=False).astype(self.output_dtype, copy=False) for out in outs]
        return outs if self.divisor == 1.0 else [out / np.float32(self.divisor) for out in outs]

    def read_stored(
        self, wanted: list[tuple[int, Indices]], envs: Indices, device: th.device
    ) -> list[npt.NDArray[Any]]:
        """Like :meth:`read`, but in the stored dtype and without normalization."""
        if envs.dtype != np.int64:  # NumPy 1 draws int32 on Windows
            envs = envs.astype(np.int64)
        with self.lock.held:
            outs = [self.outputs.take((len(envs), *self.shape), self.stored_dtype, device) for _ in wanted]
            self.fill(wanted, envs, outs)
        return outs

    def fill(self, wanted: list[tuple[int, Indices]], envs: Indices, outs: list[npt.NDArray[Any]]) -> None:
        """Like :meth:`read_stored`, but into the arrays ``outs``. The caller must hold the lock."""
        self._fill(wanted, envs, outs)
        if self.digests is not None:
            for (column, slots), out in zip(wanted, outs, strict=True):
                self.digests.compare(column, slots, envs, out)

    @abstractmethod
    def _fill(self, wanted: list[tuple[int, Indices]], envs: Indices, outs: list[npt.NDArray[Any]]) -> None:
        """Write the observations of :meth:`read_stored` into ``outs``."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all observations."""

    @abstractmethod
    def check(self) -> None:
        """Raise :class:`~sb3_extra_buffers.errors.CorruptDataError` unless all invariants of the store hold."""

    @abstractmethod
    def state(self) -> State:
        """All observations, as values and arrays."""

    @abstractmethod
    def restore(self, state: SavedState) -> None:
        """Read what :meth:`state` returned, in a store that was made with the same arguments."""

    def __getstate__(self) -> dict[str, Any]:
        return {"arguments": arguments_of(self), "state": Pickled(self.lock.held, self.state)}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning was shown when the store was created
            type(self).__init__(self, **pickled["arguments"])
        self.restore(unpickled(pickled["state"]))

    def _digests_of(self, observations: Sequence[npt.NDArray[Any]]) -> list[Digests] | None:
        return None if self.digests is None else [digests_of(part) for part in observations]

    def _place_digests(
        self, places: Sequence[tuple[int, int]], digests: Sequence[Digests] | None, lanes: Indices | None = None
    ) -> None:
        if self.digests is not None and digests is not None:
            for (column, slot), values in zip(places, digests, strict=True):
                self.digests.columns[column][slot if lanes is None else (slot, lanes)] = values

    def _restore_digests(self, state: SavedState) -> None:
        # Observations that were saved without checksums are not verified.
        if self.digests is not None and state.has("digests") and state.part("digests").array_names():
            self._restore_columns(state.part("digests"), self.digests.columns)

    def _restore_columns(self, state: SavedState, columns: list[npt.NDArray[Any]]) -> None:
        for column, fresh in enumerate(columns):
            saved = state.array(str(column), fresh.dtype, fresh.shape)
            if self._make_zeros is np.zeros:
                columns[column] = saved
            else:
                fresh[:] = saved
