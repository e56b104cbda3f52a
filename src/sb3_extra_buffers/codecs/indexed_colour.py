"""Indexed colour: one byte per pixel instead of three, in front of any codec.

Retro games and Doom draw with at most 256 colours. As indices into a palette, frames are a third as large before the
codec encodes them, and smaller afterwards, too. New colours are added to the palette, and none is ever removed, so all
records share it. A record whose new colours do not all fit into the palette is stored raw, and adds none.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import NO_REFERENCE, Bytes, Codec, Encoded, FrameSpec, Indices, payloads
from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.state import SavedState, State

MOST_COLOURS = 256
_SLOTS = 1024
"""Slots of the hash table that finds colours: four times as many as colours, so that collisions are few."""
_KERNELS = "sb3_extra_buffers.codecs.indexed_kernels"


class IndexedColourCodec(Codec):
    """Replace pixels by palette indices, and encode these with the codec that ``make_inner`` returns."""

    def __init__(self, frame: FrameSpec, make_inner: Callable[[FrameSpec], Codec]) -> None:
        if frame.channels != 3 or frame.dtype.itemsize != 1:
            raise ConfigurationError(
                "indexed_colour is for RGB images of dtype uint8, with a first or last axis of 3 for each frame, not "
                f"for {frame.channels} channels of dtype {frame.dtype}. Leave it out."
            )
        super().__init__(frame)
        row_bytes = frame.row_bytes // 3 if frame.channels_last else frame.row_bytes
        self.inner = make_inner(FrameSpec(frame.size // 3, np.dtype(np.uint8), row_bytes=row_bytes))
        self.name = self.inner.name  # type: ignore[misc]  # one class, any codec
        self.encodes_together = self.inner.encodes_together  # type: ignore[misc]
        self.frames_per_record = self.inner.frames_per_record
        self.palette: Bytes = np.zeros((MOST_COLOURS, 3), dtype=np.uint8)
        self.n_colours = np.zeros(1, dtype=np.int64)
        # A hash table: colours as 24-bit numbers plus one (0: empty slot), and their indices in the palette.
        self._keys = np.zeros(_SLOTS, dtype=np.uint32)
        self._values = np.zeros(_SLOTS, dtype=np.uint8)

    @property
    def label(self) -> str:
        return f"{self.inner.label}, indexed colour"

    @property
    def min_encoded_size(self) -> int:
        return self.inner.min_encoded_size

    @property
    def reference_bytes(self) -> int:
        return self.inner.reference_bytes + self.palette.nbytes + self._keys.nbytes + self._values.nbytes

    def encode(self, records: Bytes, lanes: Indices) -> Encoded:
        indices = np.empty((len(records), self.inner.record_bytes), dtype=np.uint8)
        indexed = np.empty(len(records), dtype=np.bool_)
        self._to_indices(records, self.frames_per_record, self.frame.channels_last, indices, indexed)
        if indexed.all():
            return self.inner.encode(indices, lanes)
        lengths, references = np.full(len(records), self.record_bytes), np.full(len(records), NO_REFERENCE)
        parts: list[Bytes] = list(records)
        rows = np.flatnonzero(indexed)
        if len(rows):
            inner = self.inner.encode(indices[rows], lanes[rows])
            lengths[rows], references[rows] = inner.lengths, inner.references
            for row, part in zip(rows.tolist(), np.split(inner.data, np.cumsum(inner.lengths)[:-1]), strict=True):
                parts[row] = part
        return Encoded(np.concatenate(parts), lengths, references)

    def free_encoder(self) -> None:
        self.inner.free_encoder()

    def decode(self, data: Bytes, starts: Indices, lengths: Indices, references: Indices, out: Bytes) -> None:
        raw = lengths == self.record_bytes
        for row, (_, payload) in zip(np.flatnonzero(raw), payloads(data, starts[raw], lengths[raw]), strict=True):
            out[row] = payload
        rows = np.flatnonzero(~raw)
        indices = np.empty((len(rows), self.inner.record_bytes), dtype=np.uint8)
        self.inner.decode(data, starts[rows], lengths[rows], references[rows], indices)
        kernels = load_kernels(_KERNELS)
        to_colours = to_colours_numpy if kernels is None else kernels.to_colours
        to_colours(indices, self.frames_per_record, self.frame.channels_last, self.palette, rows, out)

    def release(self, references: Indices) -> None:
        self.inner.release(references)

    def count_uses(self, references: Indices) -> bool:
        return self.inner.count_uses(references)

    def check(self, references: Indices) -> None:
        self.inner.check(references)

    @property
    def has_portable_records(self) -> bool:  # type: ignore[override]  # depends on the codec
        return self.inner.has_portable_records

    def shared_state(self) -> State:
        return {"palette": self.palette[: self.n_colours[0]], "inner": self.inner.shared_state()}

    def accepts(self, state: SavedState) -> bool:
        colours = state.array("palette", np.uint8, (None, 3))
        shared = min(len(colours), int(self.n_colours[0]))
        if len(colours) > MOST_COLOURS or not np.array_equal(colours[:shared], self.palette[:shared]):
            return False
        if len(np.unique(colours, axis=0)) != len(colours):
            raise state.error("palette", "has a colour twice")
        if not self.inner.accepts(state.part("inner")):
            return False
        self._add_colours(colours[shared:])
        return True

    def reference_content(self, reference: int) -> Bytes:
        return self.inner.reference_content(reference)

    def import_reference(self, content: Bytes) -> int:
        return self.inner.import_reference(content)

    def incref(self, references: Indices) -> None:
        self.inner.incref(references)

    def state(self) -> State:
        return {"palette": self.palette[: self.n_colours[0]], "inner": self.inner.state()}

    def restore(self, state: SavedState) -> None:
        colours = state.array("palette", np.uint8, (None, 3))
        if len(colours) > MOST_COLOURS:
            raise state.error("palette", f"has {len(colours)} colours")
        self._add_colours(colours)
        if self.n_colours[0] != len(colours):
            raise state.error("palette", "has a colour twice")
        self.inner = self.inner.restored(state.part("inner"))
        self.frames_per_record = self.inner.frames_per_record

    def _add_colours(self, colours: Bytes) -> None:
        """Append colours to the palette."""
        # Encoding an image of these colours adds them to the palette and to the hash table.
        indices, indexed = np.zeros((1, len(colours)), dtype=np.uint8), np.zeros(1, dtype=np.bool_)
        if len(colours):
            self._to_indices(colours.reshape(1, -1), 1, True, indices, indexed)

    def _to_indices(
        self, records: Bytes, group: int, channels_last: bool, indices: Bytes, indexed: npt.NDArray[np.bool_]
    ) -> None:
        kernels = load_kernels(_KERNELS)
        to_indices = to_indices_numpy if kernels is None else kernels.to_indices
        to_indices(
            records, group, channels_last, self._keys, self._values, self.palette, self.n_colours, indices, indexed
        )


def to_indices_numpy(
    records: Bytes,
    group: int,
    channels_last: bool,
    keys: np.ndarray[tuple[int], np.dtype[np.uint32]],
    values: Bytes,
    palette: Bytes,
    n_colours: Indices,
    indices: Bytes,
    indexed: np.ndarray[tuple[int], np.dtype[np.bool_]],
) -> None:
    """Replace colours by indices without numba. It finds colours by sorting, and does not use the hash table."""
    shape = (group, -1, 3) if channels_last else (group, 3, -1)
    for row, record in enumerate(records):
        pixels = record.reshape(shape)
        if not channels_last:
            pixels = pixels.swapaxes(1, 2)
        colours, firsts, places = np.unique(pixels.reshape(-1, 3), axis=0, return_index=True, return_inverse=True)
        known = {tuple(colour): i for i, colour in enumerate(palette[: n_colours[0]].tolist())}
        for colour in colours[np.argsort(firsts)].tolist():  # new colours are numbered in order of appearance
            known.setdefault(tuple(colour), len(known))
        indexed[row] = len(known) <= MOST_COLOURS
        if indexed[row]:
            n_colours[0] = len(known)
            palette[: len(known)] = list(known)
            numbers = np.array([known[tuple(colour)] for colour in colours.tolist()], dtype=np.uint8)
            indices[row] = numbers[places.reshape(-1)]


def to_colours_numpy(
    indices: Bytes, group: int, channels_last: bool, palette: Bytes, rows: Indices, out: Bytes
) -> None:
    """Write the pixels of ``indices[i]`` to row ``rows[i]`` of ``out``."""
    pixels = palette[indices.reshape(len(indices), group, indices.shape[1] // group)]
    if not channels_last:
        pixels = pixels.swapaxes(2, 3)
    out[rows] = pixels.reshape(len(indices), out.shape[1])
