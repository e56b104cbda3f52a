"""``delta-zstd``: records of ``delta`` that Zstandard compresses once more, with a dictionary of earlier records.

Steps and literals repeat from record to record, so a dictionary of them makes records smaller. Reading takes a fraction
of the time of ``zstd-dict``, because Zstandard decompresses only steps and literals, not whole frames.

A record's reference number stands for two things: its reference frame, and the dictionary that was in use when the
frame became the reference. Therefore a new dictionary also renews the reference frames of all lanes.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from sb3_extra_buffers.codecs import libzstd
from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.codecs.base import NO_REFERENCE, Bytes, Codec, Encoded, FrameSpec, Indices, payloads
from sb3_extra_buffers.codecs.delta import DeltaCodec
from sb3_extra_buffers.codecs.dictionaries import CompressedSizes, DictionaryTable
from sb3_extra_buffers.codecs.libzstd import Dictionary
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.state import SavedState, State

_DICTIONARY_BYTES = 112 << 10
"""The most bytes of records in a dictionary."""
_FIRST_BYTES = 16 << 10
"""The first dictionary contains only about this many bytes of records, so that it is ready soon."""
_SAMPLE_BYTES = 8 << 10
"""A dictionary's entropy tables are made from this many bytes of records, which follow those in the dictionary."""
_TYPICAL_RECORD_BYTES = 4 << 10
"""The size in bytes that compressors expect of a record."""
_SAMPLING_INTERVALS = (1, 4, 16)
"""The first three dictionaries are always made: of every record, then of every fourth one, then of every 16th."""
_BASELINE_RECORDS = 512
"""After a new dictionary, this many records show how well it compresses. Later ones are compared with them."""
_RENEWAL_FACTOR = 8
"""A dictionary is renewed when worse compression has cost this many times its size."""


class DeltaZstdCodec(DeltaCodec):
    """Records of ``delta``, ``frames_per_record`` frames each, compressed by Zstandard at the levels 1 to 22."""

    name = "delta-zstd"
    record_format = "delta-zstd"
    encodes_together = False
    levels = range(1, 23)
    _worth_a_reference = 4  # the bytes that a newer reference frame saves are steps, which Zstandard compresses

    def __init__(
        self, frame: FrameSpec, *, compresslevel: int = 6, frames_per_record: int = DeltaCodec.default_frames_per_record
    ) -> None:
        super().__init__(frame, frames_per_record=frames_per_record)
        self.compresslevel = compresslevel
        self._library = require("zstandard", "The compression method 'delta-zstd'", "zstd")
        self._errors = (ValueError, self._library.ZstdError, MemoryError, OverflowError)
        self._no_dictionary = self._dictionary = Dictionary(b"")
        # A dictionary that is prepared for compression takes many times its size, so only the one in use is prepared.
        self._plain_compressor = self._compressor = self._new_compressor(b"")
        self._dictionaries = DictionaryTable()
        self._sizes = CompressedSizes(_BASELINE_RECORDS)
        # For the next dictionary: records that may go into it, their size, and how many records there have been.
        self._recent: deque[bytes] = deque()
        self._recent_bytes = 0
        self._seen = 0
        self._n_made = 0
        self._is_due = False

    @property
    def min_encoded_size(self) -> int:
        return 1

    @property
    def reference_bytes(self) -> int:
        used = {id(dictionary): dictionary.nbytes for dictionary in (*self._dictionaries.values(), self._dictionary)}
        return super().reference_bytes + sum(used.values()) + self._recent_bytes

    @property
    def dictionary_addresses(self) -> Indices:
        return self._dictionaries.addresses

    def encode(self, records: Bytes, lanes: Indices) -> Encoded:
        if self._is_due and len(self._recent) > 1:
            self._renew_dictionary()
        data, lengths, references = super().encode(records, lanes)
        packed, at, view = [], 0, data.data
        for row, (length, reference) in enumerate(zip(lengths.tolist(), references.tolist(), strict=True)):
            steps = view[at : at + length]
            at += length
            # A record of an older dictionary is compressed without one: any dictionary can decompress it.
            is_current = self._dictionaries.get(reference) is self._dictionary
            record: bytes = (self._compressor if is_current else self._plain_compressor).compress(steps)
            packed.append(record if len(record) < self.record_bytes else records[row].tobytes())
            self._collect(steps)
        packed_lengths = np.fromiter(map(len, packed), dtype=np.int64, count=len(packed))
        if self._dictionary.content:
            self._sizes.add(len(packed), int(lengths.sum()), int(packed_lengths.sum()))
            if self._sizes.excess > self._renewal_threshold and self._recent_bytes > _FIRST_BYTES:
                self._is_due = True
        return Encoded(np.frombuffer(b"".join(packed), dtype=np.uint8), packed_lengths, references)

    def free_encoder(self) -> None:
        # Any dictionary can decompress what is compressed without one.
        self._compressor = self._plain_compressor
        self._is_due = False
        self._recent.clear()
        self._recent_bytes = 0

    def decode(self, data: Bytes, starts: Indices, lengths: Indices, references: Indices, out: Bytes) -> None:
        """Decode whole records one by one. With numba, a kernel of the store decodes batches instead."""
        unpacked: list[Any] = []
        decompressors = {number: self._new_decompressor(number) for number in np.unique(references).tolist()}
        for (start, payload), reference in zip(payloads(data, starts, lengths), references.tolist(), strict=True):
            if len(payload) == self.record_bytes:
                unpacked.append(payload)
                continue
            try:
                unpacked.append(decompressors[reference].decompress(payload, max_output_size=self.record_bytes))
            except self._errors as error:
                raise CorruptDataError(f"The {self.name} record at byte {start} does not decode: {error}.") from error
        sizes = np.fromiter(map(len, unpacked), dtype=np.int64, count=len(unpacked))
        joined = np.frombuffer(b"".join(unpacked), dtype=np.uint8)
        super().decode(joined, np.cumsum(sizes) - sizes, sizes, references, out)

    def _new_decompressor(self, reference: int) -> Any:
        """Create a decompressor, to be used by one thread at a time."""
        content = self._dictionaries.get(reference, self._no_dictionary).content
        dictionary = self._library.ZstdCompressionDict(content) if content else None
        return self._library.ZstdDecompressor(dict_data=dictionary)

    def _new_compressor(self, content: bytes) -> Any:
        parameters = self._library.ZstdCompressionParameters.from_level(
            self.compresslevel,
            dict_size=len(content),
            source_size=_TYPICAL_RECORD_BYTES,  # for larger records, the compressor would take megabytes
            write_content_size=False,
            write_checksum=False,
            write_dict_id=False,
        )
        dictionary = self._library.ZstdCompressionDict(content) if content else None
        if dictionary is not None:
            dictionary.precompute_compress(compression_params=parameters)
        return self._library.ZstdCompressor(compression_params=parameters, dict_data=dictionary)

    def count_uses(self, references: Indices) -> bool:
        if not super().count_uses(references):
            return False
        self._dictionaries.forget(self._uses.unused())
        return True

    def check(self, references: Indices) -> None:
        super().check(references)
        used = np.unique(np.append(references, self._current))
        for number in used[used != NO_REFERENCE].tolist():
            dictionary = self._dictionaries.get(number)
            if dictionary is None or dictionary.address != self._dictionaries.addresses[number]:
                raise CorruptDataError(f"The dictionary of reference {number} is not the one in use, or missing.")

    def reference_content(self, reference: int) -> Bytes:
        dictionary = np.frombuffer(self._dictionaries[reference].content, dtype=np.uint8)
        return np.concatenate([super().reference_content(reference), dictionary])

    def import_reference(self, content: Bytes) -> int:
        frame, own = content[: self.frame.nbytes], content[self.frame.nbytes :].tobytes()
        kept = [dictionary for dictionary in self._dictionaries.values() if dictionary.content == own]
        dictionary = kept[0] if kept else Dictionary(own)
        if not dictionary.is_valid:
            raise CorruptDataError(f"A dictionary of {len(own)} bytes is not one of Zstandard.")
        number = super().import_reference(frame)
        self._dictionaries[number] = dictionary
        return number

    def state(self) -> State:
        used = [self._dictionary]
        numbers = np.zeros(len(self._frames), dtype=np.int64)
        for reference, dictionary in self._dictionaries.items():
            if not any(dictionary is other for other in used):
                used.append(dictionary)
            numbers[reference] = [dictionary is other for other in used].index(True)
        contents = {str(i): np.frombuffer(dictionary.content, dtype=np.uint8) for i, dictionary in enumerate(used)}
        return {
            **super().state(),
            "dictionaries": contents,
            "dictionary_numbers": numbers,
            "n_made": self._n_made,
            "recent": np.frombuffer(b"".join(self._recent), dtype=np.uint8),
            "recent_lengths": np.array([len(record) for record in self._recent], dtype=np.int64),
        }

    def restored(self, state: SavedState) -> Codec:
        self.restore(state)  # no version has had another format of these records
        return self

    def restore(self, state: SavedState) -> None:
        contents = state.part("dictionaries")
        names = [str(i) for i in range(len(contents.array_names()))]
        used = [Dictionary(contents.array(name, np.uint8, (None,)).tobytes()) for name in names]
        if not used or not all(dictionary.is_valid for dictionary in used):
            raise state.error("dictionaries", "are not dictionaries of Zstandard")
        super().restore(state)
        numbers = state.array("dictionary_numbers", np.int64, (len(self._frames),))
        if (numbers < 0).any() or (numbers >= len(used)).any():
            raise state.error("dictionary_numbers", f"name one of {len(used)}")
        self._n_made = state.integer("n_made", 0)
        recent, lengths = state.array("recent", np.uint8, (None,)), state.array("recent_lengths", np.int64, (None,))
        if (lengths < 0).any() or lengths.sum() != len(recent):
            raise state.error("recent_lengths", f"do not add up to {len(recent)}")
        ends = np.cumsum(lengths)
        self._recent = deque(recent[end - n : end].tobytes() for end, n in zip(ends, lengths, strict=True))
        self._recent_bytes = len(recent)
        self._compressor, self._dictionary = self._new_compressor(used[0].content), used[0]
        for reference, number in enumerate(numbers.tolist()):
            if reference != NO_REFERENCE:
                self._dictionaries[reference] = used[number]

    def _new_reference(self, frame: Bytes) -> int:
        number = super()._new_reference(frame)
        self._dictionaries[number] = self._dictionary
        return number

    def _forget(self, references: Indices) -> None:
        self._dictionaries.forget(references)

    def _collect(self, steps: memoryview) -> None:
        """Keep a record for the next dictionary, unless none is planned and compression is as good as ever."""
        is_planned = self._n_made < len(_SAMPLING_INTERVALS)
        self._seen += 1
        if not is_planned and 2 * self._sizes.excess < self._renewal_threshold:
            self._recent.clear()
            self._recent_bytes = 0
            return
        if self._seen % _SAMPLING_INTERVALS[self._n_made if is_planned else -1]:
            return
        self._recent.append(steps.tobytes())
        self._recent_bytes += len(steps)
        if is_planned and self._recent_bytes >= _SAMPLE_BYTES + (_DICTIONARY_BYTES if self._n_made else _FIRST_BYTES):
            self._is_due = True
        # At least two remain: one for the dictionary, and another one for its entropy tables.
        while len(self._recent) > 2 and self._recent_bytes - len(self._recent[0]) > _SAMPLE_BYTES + _DICTIONARY_BYTES:
            self._recent_bytes -= len(self._recent.popleft())

    def _renew_dictionary(self) -> None:
        records, samples = list(self._recent), list[bytes]()
        while len(records) > 1 and sum(map(len, samples)) < _SAMPLE_BYTES:
            samples.append(records.pop())
        self._compressor = self._plain_compressor  # frees memory, which making a dictionary needs
        content = libzstd.make_dictionary(b"".join(records)[-_DICTIONARY_BYTES:], samples)
        self._compressor, self._dictionary = self._new_compressor(content), Dictionary(content)
        # The next record of each lane gets a new reference frame, which stands for the new dictionary.
        self._regret[:] = self._worth_a_reference * self.frame.nbytes + 1
        self._is_due = False
        self._n_made += 1
        self._sizes = CompressedSizes(_BASELINE_RECORDS)

    @property
    def _renewal_threshold(self) -> int:
        return _RENEWAL_FACTOR * len(self._dictionary.content)
