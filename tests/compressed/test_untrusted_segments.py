"""Segments that are for another buffer, damaged or forged: an error, and the buffer stays as it was."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import numpy as np
import pytest
import xxhash
from gymnasium import spaces

from sb3_extra_buffers.compressed import (
    CompressedDictReplayBuffer,
    CompressedReplayBuffer,
)
from sb3_extra_buffers.errors import CorruptDataError, ExtraBuffersError, FileFormatError, SegmentError
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer
from sb3_extra_buffers.persistence.container import HEADER, HEADER_BYTES
from tests.compressed.test_segments import ACTIONS, SPACE, fill, make
from tests.histories import worlds


@pytest.mark.parametrize(
    ("receiver", "problem"),
    [
        (lambda: make(space=worlds.SPACES["RGB"]), "other spaces"),
        (lambda: make(n_envs=3), "n_envs=3"),
        (lambda: CompressedReplayBuffer(200, SPACE, spaces.Discrete(5), n_envs=2), "other spaces"),
        (lambda: make(space=worlds.DICT_SPACES["Dict"], cls=CompressedDictReplayBuffer), "other spaces"),
        (lambda: GpuReplayBuffer(200, SPACE, ACTIONS, device="cpu", n_envs=2), "can neither export"),
    ],
)
def test_a_segment_for_another_buffer_is_an_error(receiver: Any, problem: str) -> None:
    sender, other = make(), receiver()
    fill(sender)
    with pytest.raises(SegmentError, match=problem):
        other.ingest_segment(sender.export_segment())
    assert other.size() == 0


def test_bytes_that_are_no_segment(tmp_path) -> None:
    buffer = make()
    fill(buffer)
    buffer.save(tmp_path / "saved")
    for data, error in (
        (b"", FileFormatError),
        (b"something else", FileFormatError),
        ((tmp_path / "saved").read_bytes(), FileFormatError),
    ):
        with pytest.raises(error):
            buffer.ingest_segment(data)
    (tmp_path / "segment").write_bytes(buffer.export_segment())
    with pytest.raises(CorruptDataError, match="class"):
        CompressedReplayBuffer.load(tmp_path / "segment")


def forged(segment: bytes, change: Any) -> bytes:
    """The same with another manifest, and all checksums right."""
    fields = list(HEADER.unpack_from(segment))
    offset, length = fields[4], fields[5]
    manifest = json.loads(segment[offset : offset + length])
    change(manifest)
    text = json.dumps(manifest).encode()
    fields[5], fields[6] = len(text), xxhash.xxh3_128_digest(text)
    header = HEADER.pack(*fields)
    return header + xxhash.xxh3_128_digest(header) + segment[HEADER_BYTES:offset] + text


def test_a_few_bytes_cannot_claim_gigabytes_of_zeros() -> None:
    sender = make()
    fill(sender)

    def larger(manifest: Any) -> None:
        zeros = {"dtype": "|u1", "shape": [100 << 20], "blocks": [None] * 400}
        manifest["arrays"]["fields/rewards"] = zeros

    with pytest.raises(CorruptDataError, match="arrays would have"):
        make().ingest_segment(forged(sender.export_segment(), larger))


def test_another_versions_segment_is_an_error() -> None:
    sender = make()
    fill(sender)

    def newer(manifest: Any) -> None:
        manifest["meta"]["segment"] |= {"version": 2, "library": "9.9"}

    with pytest.raises(FileFormatError, match=r"9\.9.*same version"):
        make().ingest_segment(forged(sender.export_segment(), newer))


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Any:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    else:
        yield path


@pytest.mark.parametrize("method", ["delta", "zstd-dict", "none", "rle"])
def test_forged_segments_never_get_in(method: str) -> None:
    """Every value is replaced by others, and every array by one with other numbers. What gets in must be readable."""
    sender = make(compression_method=method)
    fill(sender, steps=40)
    segment = sender.export_segment(everything=True)
    manifest = json.loads(segment[struct.unpack_from("<Q", segment, 24)[0] :])
    for path in [*leaves(manifest["meta"])]:
        for value in (None, -1, 0, 3, 1 << 40, "x", [], {}):

            def change(manifest: Any, path: Any = path, value: Any = value) -> None:
                where = manifest["meta"]
                for key in path[:-1]:
                    where = where[key]
                where[path[-1]] = value

            check_that_it_is_refused_or_harmless(forged(segment, change))
    arrays = manifest["arrays"]
    for name, entry in arrays.items():
        for number in (number for number, block in enumerate(entry["blocks"]) if block is not None):
            check_that_it_is_refused_or_harmless(with_other_numbers(segment, name, number))


def with_other_numbers(segment: bytes, name: str, number: int) -> bytes:
    changed = bytearray(segment)

    def change(manifest: Any) -> None:
        offset = manifest["arrays"][name]["blocks"][number][0]
        itemsize = int(manifest["arrays"][name]["dtype"][2:])
        end = offset + 64 if itemsize > 1 else offset + 8
        changed[offset:end] = b"\xff" * (end - offset)
        size = np.prod(manifest["arrays"][name]["shape"]) * itemsize
        length = int(size + -size % 64)
        manifest["arrays"][name]["blocks"][number][1] = xxhash.xxh3_128_hexdigest(
            bytes(changed[offset : offset + length])
        )

    result = forged(segment, change)
    offset = HEADER.unpack_from(segment)[4]
    return result[:HEADER_BYTES] + bytes(changed[HEADER_BYTES:offset]) + result[offset:]


def check_that_it_is_refused_or_harmless(segment: bytes) -> None:
    receiver = make(50)
    try:
        receiver.ingest_segment(segment)
    except (ExtraBuffersError, ImportError):
        assert receiver.size() == 0
    receiver.check()
    # A damaged record gets in if its checksum is that of the damaged bytes. Reading it is an error.
    with contextlib.suppress(CorruptDataError):
        np.asarray(receiver.observations[:])
