"""What an earlier version wrote, this version reads.

``fixtures/`` holds records as they were once encoded. All must decode. Libraries may compress differently from version
to version, so only the bytes of formats that are defined here must also stay the same. After adding a codec or a level,
write the missing files with ``UPDATE_CODEC_FIXTURES=1 pytest tests/codecs/test_fixtures.py``; existing ones stay.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from sb3_extra_buffers.codecs.base import NO_REFERENCE, Bytes, Codec, FrameSpec
from sb3_extra_buffers.codecs.delta_words import DeltaWordsCodec
from sb3_extra_buffers.codecs.registry import METHODS, available_methods, create_codec, parse_method
from sb3_extra_buffers.storage.pickling import unpickled

FIXTURES = Path(__file__).parent / "fixtures"
UPDATE = os.environ.get("UPDATE_CODEC_FIXTURES") == "1"

DEFINED_HERE = ("none", "rle", "rle-jit", "bitpack")
METHOD_LEVELS = (
    "none",
    "rle",
    "rle-jit",
    *("gzip/0", "gzip/1", "gzip/9"),
    *("igzip/0", "igzip/1", "igzip/3"),
    *("zstd/-100", "zstd/-3", "zstd/3", "zstd/22"),
    *("lz4-frame/-10", "lz4-frame/0", "lz4-frame/9", "lz4-frame/16"),
    *("lz4-block/-10", "lz4-block/0", "lz4-block/9", "lz4-block/16"),
    "delta",
    "bitpack",
    "pixel-lz",
    "delta-zstd/6",
)
# A record format that is no method any more: ``delta`` of 1.0.0.dev0, and of buffers on a GPU.
EARLIER_FORMATS = {"delta-words": DeltaWordsCodec}
# Records of a codec that learns from the data mean nothing without what it has learnt.
WITHOUT_FIXTURES = ("zstd-dict",)

# Plain arithmetic, so that no change of a random generator can change the frames.
_STEPS = np.arange(144, dtype=np.int64)
FRAMES = {
    "image": np.where(_STEPS % 24 < 7, _STEPS // 24 * 31, 0).astype(np.uint8),
    "floats": np.array([0.0, -0.0, np.inf, -np.inf, 1.5, -2.25], dtype=np.float32)[_STEPS // 5 % 6],
    "integers": (_STEPS // 16) ** 11 - 5000,
    "bools": _STEPS % 36 < 9,
}
FRAMES["nans"] = np.where(_STEPS % 9 < 4, 0x7FF0000000000001 + _STEPS // 36, np.int64(-(2**63))).view(np.float64)
assert np.isnan(FRAMES["nans"]).any()


def record_of(frame: np.ndarray, codec: Codec) -> Bytes:
    """As many frames as a record has, each moved a little against the one before."""
    frames = [np.roll(frame, shift) for shift in range(codec.frames_per_record)]
    return np.concatenate(frames).view(np.uint8)[None]


def codec_for(method: str, frame: np.ndarray) -> Codec:
    if method in EARLIER_FORMATS:
        return EARLIER_FORMATS[method](FrameSpec(frame.size, frame.dtype))
    parsed = parse_method(method)
    if parsed.name not in available_methods():
        pytest.skip("not installed")
    codec = create_codec(parsed, FrameSpec(frame.size, frame.dtype))
    # These were written by 1.0.0.dev0, whose raw records were smaller, and whose files did not say so.
    return codec.restored(unpickled({})) if method == "none" else codec


def path_of(method: str) -> Path:
    return FIXTURES / f"{method.replace('/', '_')}.json"


def write_missing(method: str) -> None:
    cases = {}
    for name, frame in FRAMES.items():
        codec = codec_for(method, frame)
        record = record_of(frame, codec)
        encoded = codec.encode(record, np.zeros(1, dtype=np.int64))
        assert encoded.references.tolist() == [NO_REFERENCE]
        cases[name] = {"record_sha256": hashlib.sha256(record).hexdigest(), "encoded": encoded.data.tobytes().hex()}
    path_of(method).write_text(json.dumps(cases, indent=1) + "\n", encoding="utf-8")


@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize("method", [*METHOD_LEVELS, *EARLIER_FORMATS])
def test_old_bytes_decode(method: str, name: str) -> None:
    frame = FRAMES[name]
    codec = codec_for(method, frame)
    if UPDATE and not path_of(method).exists():
        write_missing(method)
    case = json.loads(path_of(method).read_text(encoding="utf-8"))[name]
    record = record_of(frame, codec)
    assert hashlib.sha256(record).hexdigest() == case["record_sha256"], "the frames of this test have changed"

    data = np.frombuffer(bytes.fromhex(case["encoded"]), dtype=np.uint8)
    zero = np.zeros(1, dtype=np.int64)
    out = np.empty_like(record)
    codec.decode(data, zero, np.array([len(data)], dtype=np.int64), np.full(1, NO_REFERENCE), out)
    np.testing.assert_array_equal(out, record)

    if method in (*DEFINED_HERE, *EARLIER_FORMATS):
        assert codec.encode(record, zero).data.tobytes().hex() == case["encoded"]


def test_every_method_has_fixtures() -> None:
    methods = {parse_method(text).name for text in METHOD_LEVELS}
    assert methods | set(WITHOUT_FIXTURES) == set(METHODS)
    assert {path.name for path in FIXTURES.iterdir()} == {
        path_of(method).name for method in (*METHOD_LEVELS, *EARLIER_FORMATS)
    }
