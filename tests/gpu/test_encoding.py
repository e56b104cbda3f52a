"""Frames that are on the device already become the same records there as on the host."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch as th

from sb3_extra_buffers.codecs.base import FrameSpec
from sb3_extra_buffers.codecs.delta import DeltaCodec, encode_numpy
from sb3_extra_buffers.codecs.rle import RleCodec
from sb3_extra_buffers.gpu_buffers.kernels import append_torch, delta_encode_torch, rle_encode_torch
from sb3_extra_buffers.gpu_buffers.kernels.frames import LENGTH_BITS
from sb3_extra_buffers.gpu_buffers.kernels.lanes import Jobs, Lanes
from sb3_extra_buffers.gpu_buffers.kernels.rle_encode_torch import RunFormat
from sb3_extra_buffers.storage.matching import append_new_frames
from tests.gpu.test_kernels import CONTENTS

N_LANES = 2


@pytest.fixture(params=["torch", "triton"])
def version(request: pytest.FixtureRequest) -> str:
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


def operations(kind: str, version: str) -> ModuleType:
    if version == "torch":
        return {"append": append_torch, "delta": delta_encode_torch, "rle": rle_encode_torch}[kind]
    from sb3_extra_buffers.gpu_buffers.kernels import append_triton, delta_encode_triton, rle_encode_triton

    return {"append": append_triton, "delta": delta_encode_triton, "rle": rle_encode_triton}[kind]


def filled(size: int, content: str, n_frames: int, device: str, offset: int = 5) -> tuple[Lanes, np.ndarray, th.Tensor]:
    """Lanes whose rings are full, their frames in order, and the number of the first. Rings begin somewhere inside."""
    rng = np.random.default_rng(0)
    frames = np.empty((N_LANES, n_frames, size), np.uint8)
    frame = rng.integers(0, 3, size=(N_LANES, size), dtype=np.uint8)
    for i in range(n_frames):
        frame = np.stack([CONTENTS[content](own, rng) for own in frame])
        frames[:, i] = frame
    first = np.array([offset, 2 * offset])
    ring = np.empty_like(frames)
    for lane in range(N_LANES):
        ring[lane, (first[lane] + np.arange(n_frames)) % n_frames] = frames[lane]
    heads = th.tensor(first + n_frames, device=device)
    lanes = Lanes(th.tensor(ring, device=device), heads, th.ones(N_LANES, dtype=th.int32, device=device))
    return lanes, frames, th.tensor(first, device=device)


def jobs_for(lengths: np.ndarray, first: th.Tensor, references: np.ndarray, group: int) -> tuple[Jobs, np.ndarray]:
    """All records one after the other, the first at an odd place."""
    which, records = np.nonzero(lengths)
    sizes = lengths[which, records]
    starts = 3 + np.cumsum(sizes) - sizes
    numbers = first.cpu().numpy()[which] + records * group
    table = np.stack([which, numbers, starts, sizes | references[which] << LENGTH_BITS])
    return Jobs(th.tensor(table, device=first.device)), starts


def records_of(heap: th.Tensor, starts: np.ndarray, lengths: np.ndarray) -> list[bytes]:
    data = heap.cpu().numpy()
    return [data[start : start + length].tobytes() for start, length in zip(starts, lengths, strict=True)]


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("size", [1, 7, 1501])
@pytest.mark.parametrize("group", [1, 3])
def test_delta(group: int, size: int, content: str, version: str, device: str) -> None:
    check_delta(size, content, group, 2 * group, version, device)


def test_delta_of_a_million_and_three_bytes(device: str) -> None:
    # Triton's interpreter would take minutes.
    version = "torch" if device == "cpu" else "triton"
    for content in ("changes a little", "changes everywhere"):
        check_delta(1_000_003, content, 1, 2, version, device)


def check_delta(size: int, content: str, group: int, n_frames: int, version: str, device: str) -> None:
    n_frames = -(-n_frames // group) * group
    encoder = operations("delta", version)
    lanes, frames, first = filled(size, content, n_frames, device, offset=group)
    codec = DeltaCodec(FrameSpec(size, np.dtype(np.uint8)), frames_per_record=group)
    references = np.array([1, 0])
    bases = np.stack([np.zeros_like(frames[0, 0]), frames[0, 0]])
    words = codec._as_words(np.repeat(bases[:, None], group, 1))[:, 0]
    table = th.tensor(words.view(np.int32), device=device)
    headers = th.zeros((N_LANES, n_frames), dtype=th.int32, device=device)
    lanes.heads[1] -= 1  # its last record is not complete
    lengths = encoder.measure_delta(lanes, first, table, th.tensor(references, device=device), headers, group)
    lengths = lengths.cpu().numpy()
    assert (lengths[0] > 0).all()
    assert lengths[1, -1] == 0
    jobs, starts = jobs_for(lengths, first, references, group)
    heap = th.full((int(lengths.sum()) + size * group + 3,), 77, dtype=th.uint8, device=device)
    encoder.write_delta(lanes, table, headers, jobs, heap, group)

    found = records_of(heap, starts, lengths[lengths > 0])
    records = frames.reshape(N_LANES, -1, group * size)
    for lane in range(N_LANES):
        n_records = int((lengths[lane] > 0).sum())
        base = np.repeat(words[references[lane]][None], n_records, 0)
        data, sizes = encode_numpy(codec._as_words(records[lane, :n_records]), base, size)
        ends = np.cumsum(sizes)
        expected = [data[end - length : end].tobytes() for end, length in zip(ends, sizes, strict=True)]
        assert [found.pop(0) for _ in range(n_records)] == expected
    assert heap[:3].tolist() == [77] * 3
    assert heap[int(lengths.sum()) + 3] == 77 or size * group == 1


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("runs_type", [None, np.uint8, np.uint32])
@pytest.mark.parametrize(
    ("size", "dtype"), [(1, np.uint8), (300, np.uint8), (20, np.int16), (10, np.float32), (6, np.int64)]
)
def test_rle(size: int, dtype: type, runs_type: type | None, content: str, version: str, device: str) -> None:
    encoder = operations("rle", version)
    codec = RleCodec(FrameSpec(size, np.dtype(dtype)), runs_type=runs_type)
    lanes, frames, first = filled(codec.record_bytes, content, 3, device)
    form = RunFormat(codec.runs_type.itemsize, codec.element_type.itemsize, codec.longest_run)
    lengths = encoder.measure_rle(lanes, first, form).cpu().numpy()
    jobs, starts = jobs_for(lengths, first, np.zeros(N_LANES, np.int64), 1)
    heap = th.full((int(lengths.sum()) + codec.record_bytes + 3,), 77, dtype=th.uint8, device=device)
    encoder.write_rle(lanes, jobs, heap, form)
    data, sizes, _ = codec.encode(frames.reshape(-1, codec.record_bytes), np.zeros(6, np.int64))
    assert lengths.reshape(-1).tolist() == sizes.tolist()
    assert b"".join(records_of(heap, starts, sizes)) == data.tobytes()


@pytest.mark.parametrize("size", [1, 6, 8, 50])
@pytest.mark.parametrize("pair", [False, True])
def test_observations_share_frames_as_on_the_host(size: int, pair: bool, version: str, device: str) -> None:
    append = operations("append", version).append_observations
    rng, stack, n_frames, n_slots = np.random.default_rng(0), 3, 8, 9
    lanes = Lanes(
        th.zeros((N_LANES, n_frames, size), dtype=th.uint8, device=device),
        th.tensor([4, 0], device=device),
        th.zeros(N_LANES, dtype=th.int32, device=device),
    )
    ring, heads = np.zeros((N_LANES, n_frames, size), np.uint8), np.array([4, 0])
    newest, known = np.zeros((N_LANES, stack * size), np.uint8), np.zeros(N_LANES, np.bool_)
    columns = [th.zeros((n_slots, N_LANES), dtype=th.int32, device=device) for _ in range(1 + pair)]
    now = rng.integers(0, 2, size=(N_LANES, stack, size), dtype=np.uint8)
    for slot in range(n_slots):
        observations = []
        for _ in columns:
            for lane in range(N_LANES):  # any number of new frames, often none or one
                new = int(rng.integers(0, stack + 1)) if rng.random() < 0.5 else 1
                fresh = rng.integers(0, 2, size=(new, size), dtype=np.uint8)
                now[lane] = np.concatenate([now[lane, new:], fresh])
            observations.append(now.copy())
        append(lanes, [th.tensor(part, device=device) for part in observations], columns, [slot] * len(columns))
        for column, part in zip(columns, observations, strict=True):
            ends = np.empty((1, N_LANES), np.int64)
            append_new_frames(
                np.arange(N_LANES), (part.reshape(N_LANES, -1),), 1, size, size, stack, np.zeros((1, 1), np.uint64),
                newest, known, ring, heads, heads, ends,
            )  # fmt: skip
            assert column[slot].tolist() == ends[0].tolist()
        assert lanes.heads.tolist() == heads.tolist()
    np.testing.assert_array_equal(lanes.ring.cpu().numpy(), ring)
