"""``zstd-dict``: Zstandard with a dictionary of frames that the buffer has seen.

A dictionary consists of raw frames, which records refer to, and of entropy tables made from later records, so that
records need no tables of their own. The first dictionary is made from the first frames. A second one, from frames
further apart, soon replaces it. After that, the dictionary is renewed when records no longer compress as well as those
made when it was new, and this has cost several times its size. A record keeps the dictionary that it was compressed
with: dictionaries are reference-counted.

With several frames of a lane in one record (``frames_per_record``), records become far smaller, because consecutive
frames are very similar.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import numpy as np

from sb3_extra_buffers.codecs import libzstd
from sb3_extra_buffers.codecs.base import NO_REFERENCE, Bytes, Encoded, FrameSpec, Indices, checked_frames_per_record
from sb3_extra_buffers.codecs.dictionaries import CompressedSizes, DictionaryTable
from sb3_extra_buffers.codecs.references import UseCounts
from sb3_extra_buffers.codecs.zstd import ZstdCodec
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.state import SavedState, State

_DICTIONARY_FRAMES = 16
"""The number of frames in a dictionary, unless they are large."""
_DICTIONARY_BYTES = 1 << 20
"""A dictionary contains fewer frames if more would exceed this size."""
_SAMPLES = 16
"""A dictionary's entropy tables are made from this many records, unless they are large."""
_SAMPLE_BYTES = 1 << 17
"""Entropy tables are made from fewer records if these already have this many bytes."""
_SAMPLING_INTERVAL = 64
"""After the first dictionary, one in this many frames is collected for the next one."""
_BASELINE_RECORDS = 1024
"""After a new dictionary, this many records show how well it compresses. Later ones are compared with them."""
_MOST_DICTIONARIES = 1 << 20
"""Files with larger dictionary numbers are corrupt."""
_RENEWAL_FACTOR = 8
"""A dictionary is renewed when worse compression has cost this many times its size."""


class ZstdDictCodec(ZstdCodec):
    """Zstandard with dictionaries of frames, the levels of ``zstd``, and ``frames_per_record`` frames per record."""

    name = "zstd-dict"
    default_frames_per_record = 1

    def __init__(
        self, frame: FrameSpec, *, compresslevel: int = 3, frames_per_record: int = default_frames_per_record
    ) -> None:
        super().__init__(frame, compresslevel=compresslevel)
        self.frames_per_record = checked_frames_per_record(frames_per_record, 256)
        self._dictionary_frames = max(1, min(_DICTIONARY_FRAMES, _DICTIONARY_BYTES // frame.nbytes))
        self._uses = UseCounts()
        self._dictionaries = DictionaryTable()
        self._current = NO_REFERENCE
        self._recent: deque[bytes] = deque(maxlen=self._dictionary_frames)
        self._content = b""
        """The frames of the next dictionary, while records for its entropy tables are collected."""
        self._samples: list[bytes] = []
        self._spread = 1
        self._planned = 2
        """How many dictionaries will still be made in any case: a first one and a better one."""
        self._frames_seen = 0
        self._sizes = CompressedSizes(_BASELINE_RECORDS)
        self._prepared: tuple[libzstd.Dictionary, Any] | None = None
        """A dictionary, and a compressor with it. Preparing one takes many times its size, so only one is prepared."""

    @property
    def reference_bytes(self) -> int:
        collected = sum(map(len, self._recent)) + len(self._content) + sum(map(len, self._samples))
        return sum(dictionary.nbytes for dictionary in self._dictionaries.values()) + collected

    @property
    def dictionary_addresses(self) -> Indices:
        return self._dictionaries.addresses

    def encode(self, records: Bytes, lanes: Indices) -> Encoded:
        self._collect(records)
        data, lengths, _ = super().encode(records, lanes)
        references = np.full(len(records), self._current)
        self._uses.incref(references)
        if self._current != NO_REFERENCE:
            self._sizes.add(len(records), records.size, len(data))
            threshold = _RENEWAL_FACTOR * len(self._dictionaries[self._current].content)
            if self._sizes.excess > threshold and not self._content:
                self._begin_dictionary()
        return Encoded(data, lengths, references)

    def free_encoder(self) -> None:
        self._prepared = None
        self._content, self._samples = b"", []
        self._recent.clear()

    def _decode_one_by_one(
        self, data: Bytes, starts: Indices, lengths: Indices, references: Indices, out: Bytes
    ) -> None:
        for reference in np.unique(references).tolist():
            decompress = partial(self._decompressor_for(reference).decompress, max_output_size=self.record_bytes)
            rows = np.flatnonzero(references == reference)
            if len(rows) == len(references):
                self._decode_with(decompress, data, starts, lengths, out)
            else:
                part = np.empty((len(rows), self.record_bytes), dtype=np.uint8)
                self._decode_with(decompress, data, starts[rows], lengths[rows], part)
                out[rows] = part

    def release(self, references: Indices) -> None:
        self._dictionaries.forget(self._uses.decref(references))

    def count_uses(self, references: Indices) -> bool:
        used = np.append(references, self._current)
        if not {NO_REFERENCE, *self._dictionaries}.issuperset(np.unique(used).tolist()):
            return False
        self._uses.restart(max(self._dictionaries, default=0) + 1)
        self._uses.incref(used)
        self._dictionaries.forget(self._uses.unused())
        return True

    def check(self, references: Indices) -> None:
        self._uses.check(np.append(references, self._current))
        numbers = {NO_REFERENCE, *self._dictionaries}
        used = {NO_REFERENCE, self._current, *np.unique(references).tolist()}
        if numbers != used:
            raise CorruptDataError(f"Dictionaries {sorted(numbers)} are kept, but {sorted(used)} are in use.")

    def reference_content(self, reference: int) -> Bytes:
        return _as_array(self._dictionaries[reference].content)

    def import_reference(self, content: Bytes) -> int:
        dictionary = libzstd.Dictionary(content.tobytes())
        if not dictionary.is_valid:
            raise CorruptDataError(f"A dictionary of {len(content)} bytes is not one of Zstandard.")
        number = self._uses.new()
        self._dictionaries[number] = dictionary
        return number

    def incref(self, references: Indices) -> None:
        self._uses.incref(references)

    def state(self) -> State:
        return {
            "dictionaries": {str(number): _as_array(one.content) for number, one in self._dictionaries.items()},
            "current": self._current,
            "recent": _as_array(b"".join(self._recent)),
            "content": _as_array(self._content),
            "samples": _as_array(b"".join(self._samples)),
            "spread": self._spread,
            "planned": self._planned,
            "frames_seen": self._frames_seen,
            "records": self._sizes.n_records,
            "bytes": self._sizes.bytes_after,
            "excess": self._sizes.excess,
        }

    def restore(self, state: SavedState) -> None:
        dictionaries = state.part("dictionaries")
        names = dictionaries.array_names()
        numbers = {int(name): name for name in names if name.isdecimal()}
        if len(numbers) < len(names) or not all(0 < number < _MOST_DICTIONARIES for number in numbers):
            raise state.error("dictionaries", f"have the numbers {sorted(names)}")
        for number, name in numbers.items():
            self._dictionaries[number] = libzstd.Dictionary(dictionaries.array(name, np.uint8, (None,)).tobytes())
        if not all(dictionary.is_valid for dictionary in self._dictionaries.values()):
            raise state.error("dictionaries", "are not dictionaries of Zstandard")
        self._current = state.integer("current")
        if self._current not in {NO_REFERENCE, *self._dictionaries}:
            raise state.error("current", f"names dictionary {self._current}, which does not exist")
        self._recent = deque(_pieces(state, "recent", self.frame.nbytes), self._dictionary_frames)
        self._content = state.array("content", np.uint8, (None,)).tobytes()
        self._samples = _pieces(state, "samples", self.record_bytes)
        self._spread = state.integer("spread", 1)
        self._planned = state.integer("planned")
        self._frames_seen = state.integer("frames_seen")
        self._restore_sizes(state.integer("records"), state.integer("bytes"), state.number("excess"))

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        """Accept pickles of 1.0.0.dev0, so that :meth:`state` can be called."""
        vars(self).update(attributes)
        self._dictionaries = DictionaryTable()
        for number, content in attributes["_dictionaries"].items():
            self._dictionaries[number] = libzstd.Dictionary(content)
        self._restore_sizes(attributes["_records"], attributes["_bytes"], attributes["_excess"])

    def _restore_sizes(self, n_records: int, n_bytes: int, excess: float) -> None:
        before = n_records * self.record_bytes
        self._sizes = CompressedSizes(_BASELINE_RECORDS, n_records, before, n_bytes, excess)

    def _collect(self, records: Bytes) -> None:
        """Collect frames and records for the next dictionary, and make it when there are enough."""
        if self._content:
            self._samples += [record.tobytes() for record in records]
            if len(self._samples) >= min(_SAMPLES, -(-_SAMPLE_BYTES // self.record_bytes)):
                self._renew()
        for frame in records.reshape(-1, self.frame.nbytes):
            if self._frames_seen % self._spread == 0:
                self._recent.append(frame.tobytes())
                if self._planned > 0 and self._frames_seen >= max(1, self._dictionary_frames - 1) * self._spread:
                    self._begin_dictionary()
                    self._planned -= 1
                    self._spread, self._frames_seen = _SAMPLING_INTERVAL, 0
            self._frames_seen += 1

    def _begin_dictionary(self) -> None:
        # The newest frames come last: Zstandard needs the fewest bits to refer to the end of a dictionary.
        self._content = b"".join(self._recent)
        self._samples = []

    def _renew(self) -> None:
        # The new dictionary exists before it is used, and is used before the old one is released, because Ctrl-C may
        # come at any moment.
        content = libzstd.make_dictionary(self._content, self._samples)
        replaced, number = self._current, self._uses.new()
        self._dictionaries[number] = libzstd.Dictionary(content)
        self._current = number
        if replaced != NO_REFERENCE:
            self._dictionaries.forget(self._uses.decref(np.array([replaced])))
        self._content, self._samples = b"", []
        self._sizes = CompressedSizes(_BASELINE_RECORDS)

    @property
    def _compressor(self) -> Any:
        if self._current == NO_REFERENCE:
            return super()._compressor
        dictionary = self._dictionaries[self._current]
        if self._prepared is None or self._prepared[0] is not dictionary:
            prepared = self._library.ZstdCompressionDict(dictionary.content)
            prepared.precompute_compress(level=self.compresslevel)
            compressor = self._library.ZstdCompressor(
                self.compresslevel,
                dict_data=prepared,
                write_content_size=False,
                write_checksum=False,
                write_dict_id=False,
            )
            self._prepared = dictionary, compressor
        return self._prepared[1]

    def _decompressor_for(self, reference: int) -> Any:
        if reference == NO_REFERENCE:
            return self._decompressor
        dictionary = self._dictionaries.get(reference)
        if dictionary is None:
            raise CorruptDataError(f"A record needs dictionary {reference}, which does not exist.")
        kept = self._contexts.__dict__.setdefault("decompressors", {})
        if reference not in kept or kept[reference][0] is not dictionary:
            for gone in kept.keys() - self._dictionaries.keys():
                del kept[gone]
            prepared = self._library.ZstdCompressionDict(dictionary.content)
            kept[reference] = dictionary, self._library.ZstdDecompressor(dict_data=prepared)
        return kept[reference][1]


def _as_array(content: bytes) -> Bytes:
    return np.frombuffer(content, dtype=np.uint8)


def _pieces(state: SavedState, name: str, size: int) -> list[bytes]:
    content = state.array(name, np.uint8, (None,))
    if len(content) % size:
        raise state.error(name, f"must be pieces of {size} bytes")
    return [piece.tobytes() for piece in content.reshape(-1, size)]
