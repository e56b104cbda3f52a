"""Records that no device can decode, decoded by the host on several cores."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from sb3_extra_buffers.codecs.base import Bytes, Codec, Indices
from sb3_extra_buffers.codecs.zstd import ZstdCodec
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.threads import run_in_slices

_MOST_SLICES = 8
_SMALLEST_SLICE_BYTES = 1 << 18
_thread = threading.local()


def decode_records(codec: Codec, data: Bytes, starts: Indices, lengths: Indices, out: Bytes) -> None:
    """Decode records without references into the rows of ``out``."""

    def work(low: int, high: int) -> None:
        part = slice(low, high)
        if isinstance(codec, ZstdCodec) and _has_batch_call(codec):
            _decode_by_one_call(codec, data, starts[part], lengths[part], out[part])
        else:
            codec.decode(data, starts[part], lengths[part], np.zeros(high - low, dtype=np.int64), out[part])

    run_in_slices(work, len(out), min(out.nbytes, _MOST_SLICES * _SMALLEST_SLICE_BYTES))


def _has_batch_call(codec: ZstdCodec) -> bool:
    return "multi_decompress_to_buffer" in codec._library.backend_features


def _decode_by_one_call(codec: ZstdCodec, data: Bytes, starts: Indices, lengths: Indices, out: Bytes) -> None:
    """A call for each record would make the threads fight for the interpreter's lock: they were slower than one."""
    compressed = np.flatnonzero(lengths != codec.record_bytes)
    raw = np.flatnonzero(lengths == codec.record_bytes)
    errors: tuple[type[Exception], ...] = (ValueError, *codec._errors)
    try:
        if len(compressed):
            segments = np.stack([starts[compressed], lengths[compressed]], axis=1).astype(np.uint64)
            sizes = np.full(len(compressed), codec.record_bytes, dtype=np.uint64)
            source = codec._library.BufferWithSegments(data, segments)
            decoded = _decompressor(codec).multi_decompress_to_buffer(source, decompressed_sizes=sizes, threads=1)
            for row, record in zip(compressed.tolist(), decoded, strict=True):
                out[row].data[:] = record
        for row in raw.tolist():
            out[row] = data[starts[row] : starts[row] + codec.record_bytes]
    except errors as error:
        raise CorruptDataError(f"A batch of {codec.name} records does not decode: {error}.") from error


def _decompressor(codec: ZstdCodec) -> Any:
    """One for each thread: it must not be used by two at once."""
    if not hasattr(_thread, "decompressor"):
        _thread.decompressor = codec._library.ZstdDecompressor()
    return _thread.decompressor
