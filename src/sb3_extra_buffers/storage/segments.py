"""Steps of a store as values and arrays, for another store of the same observations.

There are two forms. *Frames* are records, copied without decoding them, and an index into them. *Rows* are raw
observations, which any store can export and receive. They are for small observations, and for stores that cannot hold
the records.

Receiving has two parts. :func:`receive` does all that can fail, and stores records that nothing refers to yet. Then
:func:`place` puts the observations into slots.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.base_store import CPU, BaseStore
from sb3_extra_buffers.storage.choice import NONE
from sb3_extra_buffers.storage.config import CodecRecipe, StorageConfig
from sb3_extra_buffers.storage.digests import UNKNOWN, Digests
from sb3_extra_buffers.storage.observation_store import ObservationStore
from sb3_extra_buffers.storage.record_copies import append_records, restored, seal, state_of, take_records
from sb3_extra_buffers.storage.stacking import StackLayout

Columns = list[npt.NDArray[Any]]
"""For each column, an array of ``(steps, n_envs, ...)``."""


class Rows(NamedTuple):
    """Raw observations."""

    columns: Columns
    contents: dict[str, Bytes]
    """The references of the segment's records, by checksum, if it has records."""


class Frames(NamedTuple):
    """Observations whose records are in the store already."""

    columns: Columns
    """For each observation, the number of the frame after its last one."""
    digests: Columns | None
    contents: dict[str, Bytes]


Received = Rows | Frames


def export_steps(store: BaseStore, columns: Sequence[Indices], known: set[str]) -> tuple[State, set[str]]:
    """Export the observations in some slots of each column. Also returns the checksums of references that they need.

    :param columns: For each column of the store, its slots, oldest first. The newest observation must be among them.
    :param known: The references that the receiver has.
    """
    if not isinstance(store, ObservationStore) or not store._has_elements:
        return _export_rows(store, columns), set()
    exported = _export_frames(store, columns, known)
    if exported is None:
        exported = _export_frames(_copy_of(store, columns), [np.arange(len(slots)) for slots in columns], known)
    assert exported is not None
    return exported


def _export_rows(store: BaseStore, columns: Sequence[Indices]) -> State:
    observations = [_read(store, column, slots) for column, slots in enumerate(columns)]
    state: dict[str, Any] = {"form": "rows", "observations": observations[0]}
    if len(observations) == 2:
        # Only next observations that differ from the following observation are sent. For NaN, bytes are compared.
        following = observations[1]
        n_steps, n_envs = following.shape[:2]
        differs = np.ones((n_steps, n_envs), dtype=np.bool_)
        if n_steps > 1 and following.size:
            later, now = (_as_bytes(part) for part in (observations[0][1:], following[:-1]))
            differs[:-1] = (later != now).any(axis=2)
        state |= {"differs": np.packbits(differs), "following": following[differs]}
    return state


def _export_frames(
    store: ObservationStore, columns: Sequence[Indices], known: set[str]
) -> tuple[State, set[str]] | None:
    """Export records; ``None`` if a replaced codec has stored some of the observations, or records are not portable."""
    frames, stack = store.frames, store.layout.stack
    ends = [store.ends[column][slots].astype(np.int64) for column, slots in enumerate(columns)]
    lowest = np.min([column.min(axis=0) for column in ends], axis=0) - stack
    if (lowest < frames.base).any() or not frames.codec.has_portable_records:
        return None
    seal(frames, store._oldest)
    firsts = lowest // frames.codec.frames_per_record
    records = take_records(frames, firsts)
    relative = [column - firsts * frames.codec.frames_per_record for column in ends]
    dtype = np.min_scalar_type(max(int(column.max()) for column in relative))
    digests = [] if store.digests is None else store.digests.columns
    state = {
        "form": "frames",
        "dtype": store.stored_dtype.str,
        "layout": store.layout.state(),
        **store.recipe.state(),
        "shared": frames.codec.shared_state(),
        "records": state_of(records, known),
        "ends": {str(column): part.astype(dtype) for column, part in enumerate(relative)},
        "digests": {str(column): part[columns[column]] for column, part in enumerate(digests)},
    }
    return state, set(records.digests)


def _copy_of(store: ObservationStore, columns: Sequence[Indices]) -> ObservationStore:
    """Copy the observations to a store of their own, all encoded by the codec in use."""
    copied = _empty_store(store, [len(slots) for slots in columns])
    copied.use(store.layout, store.recipe)
    place(copied, Rows([_read(store, column, slots) for column, slots in enumerate(columns)], {}), 0)
    return copied


def _empty_store(store: BaseStore, n_rows: Sequence[int]) -> ObservationStore:
    config = StorageConfig(NONE, store.config.elem_type, None)
    verify = store.digests is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a lossy elem_type was reported when the buffer was created
        return ObservationStore(n_rows[0], store.n_envs, store.shape, store.dtype, config, len(n_rows), verify=verify)


def _read(store: BaseStore, column: int, slots: Indices) -> npt.NDArray[Any]:
    """The observations of all environments in ``slots``, ``(slots, n_envs, *shape)``."""
    n_envs = store.n_envs
    envs = np.tile(np.arange(n_envs), len(slots))
    (found,) = store.read_stored([(column, np.repeat(slots, n_envs).astype(np.int64))], envs, CPU)
    return found.reshape(len(slots), n_envs, *store.shape)


def _as_bytes(observations: npt.NDArray[Any]) -> Bytes:
    n_steps, n_envs = observations.shape[:2]
    return np.ascontiguousarray(observations).reshape(n_steps, n_envs, -1).view(np.uint8)


def receive(store: BaseStore, state: SavedState, n_rows: Sequence[int], known: dict[str, Bytes]) -> Received:
    """Validate and store observations that :func:`export_steps` returned. No slot changes yet.

    :param n_rows: The number of slots in each column of the segment.
    :param known: References of the previous segment, by checksum.
    """
    form = state.value("form")
    if form == "rows":
        return _receive_rows(store, state, n_rows)
    if form != "frames":
        raise state.error("form", f"must be 'frames' or 'rows', not {form!r}")
    if state.value("dtype") != store.stored_dtype.str:
        raise state.error("dtype", f"is {state.value('dtype')!r}, but this buffer stores {store.stored_dtype.str!r}")
    layout = StackLayout.restored(state.part("layout"), store.shape, store.stored_dtype)
    recipe = CodecRecipe.restored(state)
    if isinstance(store, ObservationStore) and store.adopt(layout, recipe, state.part("shared")):
        return _receive_frames(store, state, n_rows, known)
    # The store cannot hold these records: decode the segment.
    copied = _empty_store(store, n_rows)
    copied.use(layout, recipe)
    if not copied.codec.accepts(state.part("shared")):
        raise state.error("shared", "does not agree with the method")
    received = _receive_frames(copied, state, n_rows, known)
    place(copied, received, 0)
    columns = [_read(copied, column, np.arange(n)) for column, n in enumerate(n_rows)]
    return Rows(columns, received.contents)


def _receive_rows(store: BaseStore, state: SavedState, n_rows: Sequence[int]) -> Rows:
    shape = (store.n_envs, *store.shape)
    columns = [state.array("observations", store.stored_dtype, (n_rows[0], *shape))]
    if len(n_rows) == 2:
        n_cells = n_rows[1] * store.n_envs
        bits = state.array("differs", np.uint8, (-(-n_cells // 8),))
        differs = np.unpackbits(bits, count=n_cells).reshape(n_rows[1], store.n_envs).astype(np.bool_)
        if n_rows[1] and not differs[-1].all():
            raise state.error("differs", "leaves out a next observation of the last step")
        following = np.empty_like(columns[0])
        following[:-1] = columns[0][1:]
        following[differs] = state.array("following", store.stored_dtype, (int(differs.sum()), *store.shape))
        columns.append(following)
    return Rows(columns, {})


def _receive_frames(
    store: ObservationStore, state: SavedState, n_rows: Sequence[int], known: dict[str, Bytes]
) -> Frames:
    codec, stack = store.codec, store.layout.stack
    records = restored(state.part("records"), store.n_envs, codec.frames_per_record, known)
    lengths = records.lengths
    if ((lengths < codec.min_encoded_size) | (lengths > codec.max_encoded_size)).any():
        raise state.error("records", f"have lengths that no record of the method {codec.label!r} has")
    parts, digests = state.part("ends"), state.part("digests")
    ends, columns = [], []
    for column, n in enumerate(n_rows):
        dtype = parts.dtype(str(column))
        dtype = dtype if dtype in (np.uint8, np.uint16) else np.dtype(np.uint32)
        ends.append(parts.array(str(column), dtype, (n, store.n_envs)).astype(np.int64))
        if (ends[-1] < stack).any() or (ends[-1] > records.counts * codec.frames_per_record).any():
            raise parts.error(str(column), "name frames that the segment does not have")
        if digests.array_names():
            columns.append(digests.array(str(column), np.uint64, (n, store.n_envs)))
    try:
        firsts = append_records(store.frames, records, store._oldest)
    except CorruptDataError as error:
        raise state.error("records", f"are not what they should be: {error}") from error
    contents = {digest: records.contents[digest] for digest in records.digests}
    return Frames([part + firsts for part in ends], columns or None, contents)


def as_columns(received: Received, n_columns: int, shares: bool) -> Received:
    """Convert received observations for a store with another number of columns.

    :param shares: Whether a store with one column finds next observations in the following slots, as with SB3's
        ``optimize_memory_usage``.
    """

    def converted(columns: Columns) -> Columns:
        if len(columns) == 1 and n_columns == 2:
            return [columns[0][:-1], columns[0][1:]]
        if len(columns) == 2 and n_columns == 1 and shares:
            return [np.concatenate([columns[0], columns[1][-1:]])]
        return columns

    if isinstance(received, Frames) and received.digests is not None:
        received = received._replace(digests=converted(received.digests))
    return received._replace(columns=converted(received.columns))


def place(store: BaseStore, received: Received, first: int) -> None:
    """Put observations into the slots from ``first`` on. They must have the store's number of columns."""
    if isinstance(received, Frames):
        assert isinstance(store, ObservationStore)
        for column, ends in enumerate(received.columns):
            digests = None if received.digests is None else received.digests[column]
            _place_ends(store, column, first, ends, digests)
        store.finish_copying()
        return
    for step in range(len(received.columns[0])):
        slot = (first + step) % store.n_slots
        if len(received.columns) == 1:
            store.write(0, slot, store.checked(received.columns[0][step]))
        else:
            pair = store.checked_pair(*(column[step] for column in received.columns))
            store.place_step(slot, store.stage(slot, pair))
            store.finish_step()


def _place_ends(
    store: ObservationStore, column: int, first: int, ends: npt.NDArray[Any], digests: Digests | None
) -> None:
    kept = min(len(ends), store.n_slots)  # if there are more, the last ones would overwrite the first ones
    slots = (first + np.arange(len(ends) - kept, len(ends))) % store.n_slots
    store.slots_used = max(store.slots_used, int(slots.max(initial=-1)) + 1)
    store._is_current[slots // store._piece] = False
    store.ends[column][slots] = ends[len(ends) - kept :]
    if store.digests is not None:
        store.digests.columns[column][slots] = UNKNOWN if digests is None else digests[len(ends) - kept :]
