"""What the codec tests share: frames of every kind, and a way through an arena and back."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import strategies as st

from sb3_extra_buffers.codecs.base import Bytes, Codec, FrameSpec, Indices
from sb3_extra_buffers.codecs.packed_frames import PackedFramesCodec
from sb3_extra_buffers.codecs.registry import METHODS, available_methods

DTYPES = [np.dtype(name) for name in ("uint8", "int8", "bool", "int32", "int64", "float32", "float64")]
CONTENTS = ("constant", "noise", "sparse", "special", "stripes")


def usable_methods() -> list[object]:
    """Every registered method as a test parameter, marked where its module or package is not there."""
    parameters = []
    for name, entry in METHODS.items():
        written = importlib.util.find_spec(f"sb3_extra_buffers.codecs.{entry.module}") is not None
        skip = pytest.mark.skipif(not written or name not in available_methods(), reason="not installed")
        parameters.append(pytest.param(name, marks=skip))
    return parameters


def special_elements(dtype: np.dtype) -> np.ndarray:
    """Values whose bits are easily lost: signed zeros, infinities, quiet and signalling NaN with payloads, limits."""
    if dtype.kind == "f":
        unsigned = np.dtype(f"u{dtype.itemsize}")
        exponent = np.array([np.inf], dtype=dtype).view(unsigned)[0]
        payloads = [exponent | unsigned.type(bits) for bits in (1, 77)]
        nans = np.array(payloads, dtype=unsigned).view(dtype)
        return np.concatenate([np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.5], dtype=dtype), nans])
    if dtype.kind == "b":
        return np.array([False, True])
    return np.array([np.iinfo(dtype).min, 0, 1, np.iinfo(dtype).max], dtype=dtype)


def make_records(content: str, n_records: int, record_bytes: int, dtype: np.dtype, seed: int) -> Bytes:
    """``n_records`` records of ``dtype``, as bytes."""
    random = np.random.default_rng(seed)
    size = record_bytes // dtype.itemsize
    if content == "noise":
        return random.integers(0, 256, (n_records, record_bytes)).astype(np.uint8)
    special = special_elements(dtype)
    if content == "special":
        elements = random.choice(special, (n_records, size))
    elif content == "constant":
        elements = np.repeat(random.choice(special, (n_records, 1)), size, axis=1)
    elif content == "sparse":
        elements = np.where(random.random((n_records, size)) < 0.03, random.choice(special), dtype.type(0)).astype(
            dtype
        )
    else:
        width = random.integers(1, 40)
        elements = np.tile(special[np.arange(size) // width % len(special)], (n_records, 1))
    return np.ascontiguousarray(elements).view(np.uint8)


@st.composite
def frame_specs(draw: st.DrawFn) -> FrameSpec:
    return FrameSpec(draw(st.integers(1, 400)), draw(st.sampled_from(DTYPES)))


@dataclass
class Stored:
    """Records in an arena, apart from each other and at odd places."""

    arena: Bytes
    starts: Indices
    lengths: Indices
    references: Indices

    def decode(self, codec: Codec, order: Indices | None = None) -> Bytes:
        """The records in ``order``, rebuilt between guards that must stay as they are."""
        if order is None:
            order = np.arange(len(self.starts))
        guard = 64
        memory = np.full(len(order) * codec.record_bytes + 2 * guard, 0xA5, dtype=np.uint8)
        out = memory[guard:-guard].reshape(len(order), codec.record_bytes)
        try:
            codec.decode(self.arena, self.starts[order], self.lengths[order], self.references[order], out)
        finally:
            assert (memory[:guard] == 0xA5).all()
            assert (memory[-guard:] == 0xA5).all()
        return out


def store(codec: Codec, batches: list[Bytes], lanes: Indices) -> Stored:
    """Encode the batches one after the other, as a buffer would, into one arena."""
    pieces, starts, lengths, references, end = [], [], [], [], 0
    for records in batches:
        encoded = codec.encode(records, lanes)
        assert encoded.data.dtype == np.uint8
        assert encoded.lengths.sum() == len(encoded.data)
        assert (encoded.lengths <= codec.max_encoded_size).all()
        assert len(encoded.references) == len(records)
        for record in np.split(encoded.data, np.cumsum(encoded.lengths)[:-1]):
            gap = 1 + end % 3
            pieces += [np.full(gap, 0xEE, dtype=np.uint8), record]
            starts.append(end + gap)
            end += gap + len(record)
        lengths.append(encoded.lengths)
        references.append(encoded.references)
    return Stored(
        np.concatenate(pieces),
        np.array(starts, dtype=np.int64),
        np.concatenate(lengths),
        np.concatenate(references).astype(np.int64),
    )


def record_of(codec: type[PackedFramesCodec], *frames: bytes) -> np.ndarray:
    """A record of frames that are packed already."""
    sizes = np.array([len(frame) for frame in frames], dtype="<u4").tobytes()
    return np.frombuffer(sizes + b"".join(frames) + bytes(codec.padding), dtype=np.uint8)


def decoded_between_guards(codec: Codec, record: np.ndarray) -> np.ndarray:
    """A decoded record. Nothing may be written beside it, whether or not it is corrupt."""
    memory = np.full(codec.record_bytes + 128, 0xA5, dtype=np.uint8)
    lane = np.zeros(1, dtype=np.int64)
    try:
        codec.decode(record.copy(), lane, np.array([len(record)]), lane, memory[64:-64].reshape(1, -1))
    finally:
        assert (memory[:64] == 0xA5).all()
        assert (memory[-64:] == 0xA5).all()
    return memory[64:-64]
