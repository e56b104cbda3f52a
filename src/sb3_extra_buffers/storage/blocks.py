"""Observations of a batch as arrays that can be sent to another process: compressed if that is smaller.

A *block* contains the records that a batch needs, copied without decoding them. For each row of the batch, it says
where in these records the row's frames are. The receiver decodes all rows of several blocks in one call of the kernel
that also reads from stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import NO_REFERENCE, Bytes, Codec, Indices
from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.errors import MissingPackageError
from sb3_extra_buffers.storage.base_store import BaseStore
from sb3_extra_buffers.storage.compiled_gathering import Wanted, compiled_kernels, fill_frames, run_kernel
from sb3_extra_buffers.storage.config import CodecRecipe
from sb3_extra_buffers.storage.joined import JoinedArrays, JoinedStores
from sb3_extra_buffers.storage.observation_store import ObservationStore
from sb3_extra_buffers.storage.record_index import places_in
from sb3_extra_buffers.storage.stacking import StackLayout

Block = dict[str, Any]
_NO_RING = np.zeros((1, 1, 1), dtype=np.uint8)
_PADDING_BYTES = 64
"""Kernels read records in vectors, up to this far beyond the last one."""
_MOST_CODECS = 8
"""The size of the cache of codecs."""
_codecs: dict[tuple[str, StackLayout], Codec] = {}
"""A cache of codecs that decode blocks: creating one takes as long as decoding some rows."""


class BlockMaker:
    """Makes blocks of observations in joined stores."""

    def __init__(self, joined: JoinedStores) -> None:
        self._joined = joined
        self._encoded, self._index = JoinedArrays(1), JoinedArrays(1, 1, 1)

    def make(self, numbers: Indices, wanted: Wanted, envs: Indices) -> Block:
        """Make a block of the observations in two columns of a batch; see :meth:`.JoinedStores.fill`."""
        first = self._joined.stores[0]
        shape = (2, len(envs), *first.shape)
        block = self._records(numbers, wanted, envs) if isinstance(first, ObservationStore) else None
        n_bytes = 0 if block is None else block["data"].nbytes + block["table"].nbytes
        if block is None or n_bytes > int(np.prod(shape)) * first.stored_dtype.itemsize:
            rows = np.empty(shape, dtype=first.stored_dtype)
            self._joined.fill(numbers, wanted, envs, list(rows))
            return {"rows": rows}
        return block

    def _records(self, numbers: Indices, wanted: Wanted, envs: Indices) -> Block | None:
        """Make a block of records; ``None`` if that is not possible.

        Blocks have no dictionaries and no raw frames from the ring. All stores must use the same codec.
        """
        stores: Sequence[Any] = self._joined.stores
        first, layout = stores[0], stores[0].layout
        kernels = load_kernels("sb3_extra_buffers.storage.joined_kernels")
        if kernels is None or first.digests is not None or compiled_kernels(first.codec)[0] is None:
            return None
        usual = _codec_of(first.recipe, layout)  # what the receiver decodes with
        for store in stores:
            if store._earlier or store.recipe != first.recipe or store.layout != layout:
                return None
            if not _is_like(store.codec, usual):  # it was loaded from a file of another version
                return None
        firsts = self._joined.firsts(numbers, wanted, envs)
        frames, group = [store.frames for store in stores], first.codec.frames_per_record
        encoded = self._encoded.take([part.encoded for part in frames], numbers, envs)[0][:, 0]
        if firsts.min(initial=0) < 0 or (firsts + layout.stack > encoded).any():  # never written, or still raw
            return None
        begins, ends = firsts // group, (firsts + layout.stack - 1) // group
        # The records of a row: one range if those of its two observations overlap, otherwise two, one after the other.
        overlap = (begins[0] <= ends[1]) & (begins[1] <= ends[0])
        lowest, n_first = begins.min(axis=0), ends[0] - begins[0] + 1
        counts = np.where(overlap, ends.max(axis=0) - lowest + 1, n_first + ends[1] - begins[1] + 1)
        most = int(counts.max(initial=1))
        rows, places = np.nonzero(np.arange(most) < counts[:, None])
        after = np.where(places < n_first[rows], begins[0][rows] + places, begins[1][rows] + places - n_first[rows])
        records = np.where(overlap[rows], lowest[rows] + places, after)
        shifts = np.where(overlap, lowest, np.stack([begins[0], begins[1] - n_first]))
        row_numbers = numbers[rows]
        capacities = np.array([part.index.capacity for part in frames])[row_numbers]
        arrays = [getattr(part.index, name) for name in ("starts", "lengths", "references") for part in frames]
        taken = self._index.take(arrays, row_numbers, places_in(capacities, envs[rows], records))
        starts, lengths, references = (values[:, 0].astype(np.int64) for values in taken)
        table, references = _references(frames, row_numbers, references)
        if table is None:
            return None
        data = np.empty(int(lengths.sum()) + _PADDING_BYTES, dtype=np.uint8)
        data[-_PADDING_BYTES:] = 0  # memory that was never written must not go to another process
        addresses = np.array([part.arena.data.ctypes.data for part in frames])
        kernels.copy_spans(addresses, row_numbers, starts, lengths, data)
        found = np.zeros((3, len(envs), most), dtype=np.int64)
        found[:, rows, places] = np.cumsum(lengths) - lengths, lengths, references
        block = {"data": data, "index": found, "firsts": firsts - shifts * group, "table": table}
        return {**block, "layout": (layout.stack, layout.axis), "recipe": first.recipe}


def _is_like(codec: Codec, other: Codec) -> bool:
    """Whether one codec can decode the records of the other, given their reference frames."""
    return codec.record_format == other.record_format and all(
        getattr(codec, name) is getattr(other, name) or np.array_equal(getattr(codec, name), getattr(other, name))
        for name in ("distances", "predictors", "planes")
    )


def _references(frames: Sequence[Any], numbers: Indices, references: Indices) -> tuple[Any, Indices]:
    """The reference frames that records need, and the number of each record's; ``None`` if they need dictionaries."""
    if frames[0].codec.record_format != "delta":
        usual = frames[0].codec.reference_frames[:1].copy()  # the frame with the number NO_REFERENCE, if there is one
        return (usual if (references == NO_REFERENCE).all() else None), references
    used, numbered = np.unique(numbers << 32 | references, return_inverse=True)
    tables = [frames[key >> 32].codec.reference_frames[key & 0xFFFFFFFF] for key in used.tolist()]
    return np.stack(tables), numbered.reshape(-1)


def fill_from(blocks: Sequence[tuple[slice, Block | None]], store: BaseStore, outs: list[npt.NDArray[Any]]) -> None:
    """Write the rows of blocks into a batch.

    :param blocks: Pairs of rows of the batch, in order, and the block that contains them; ``None`` instead of a block
        for rows that are filled already.
    :param store: Any store of observations with the same shape and dtype.
    """
    # Neighbouring blocks of one kind are decoded at once. Usually all blocks are of one kind.
    for kind, group in groupby(blocks, lambda pair: _kind(pair[1])):
        alike: list[Any] = list(group)
        parts = [out[alike[0][0].start : alike[-1][0].stop] for out in outs]
        if kind == "rows":
            for i, part in enumerate(parts):
                np.concatenate([block["rows"][i] for _, block in alike], out=part)
        elif kind is not None:
            _decode([block for _, block in alike], store, parts)


def _kind(block: Block | None) -> Any:
    if block is None:
        return None
    return "rows" if "rows" in block else (block["layout"], block["recipe"])


def _decode(blocks: list[Any], store: BaseStore, outs: list[npt.NDArray[Any]]) -> None:
    """Decode blocks of one kind, which together contain all rows of ``outs``."""
    first, counts = blocks[0], [block["firsts"].shape[1] for block in blocks]
    layout = StackLayout(store.shape, store.stored_dtype, *first["layout"])
    codec = _codec_of(first["recipe"], layout)
    kernels, decompress = compiled_kernels(codec)
    if kernels is None:
        raise MissingPackageError("Decoding what shards send", "numba", "numba")
    table, kept = np.zeros(len(blocks), dtype=kernels.SOURCE), []
    numbers = np.repeat(np.arange(len(blocks)), counts)
    lanes = np.concatenate([np.arange(n) for n in counts])
    firsts = np.concatenate([block["firsts"] for block in blocks], axis=1)
    for number, (n, block) in enumerate(zip(counts, blocks, strict=True)):
        starts, lengths, references = block["index"]
        arrays = (
            np.full(n, np.iinfo(np.int64).max), block["data"], np.array(starts), lengths.astype(np.uint32),
            references.astype(np.uint32), codec.frames_per_record, np.array(block["table"]),
        )  # fmt: skip
        kernels.describe(
            table, number, _NO_RING, *arrays, codec.distances, codec.predictors, codec.planes, decompress,
            codec.dictionary_addresses,
        )  # fmt: skip
        kept.append(arrays)

    def gather(frames: list[Bytes]) -> None:
        def run(part: slice, contexts: Indices, team: Any) -> int:
            n_in_time: int = kernels.gather_from(
                table, numbers[part], lanes[part], np.ascontiguousarray(firsts[:, part]), frames[0][part],
                frames[1][part], contexts, kernels.TAKE_PART, *team,
            )  # fmt: skip
            return n_in_time

        run_kernel(run, bool(decompress), frames)

    fill_frames(layout, outs, gather)


def _codec_of(recipe: CodecRecipe, layout: StackLayout) -> Codec:
    key = str(recipe), layout
    if key not in _codecs:
        if len(_codecs) >= _MOST_CODECS:
            _codecs.clear()
        _codecs[key] = recipe.build(layout.frame)
    return _codecs[key]
