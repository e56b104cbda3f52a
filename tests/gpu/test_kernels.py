"""The kernels write the bytes of the NumPy codecs and rebuild the same frames."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch as th

from sb3_extra_buffers.codecs.base import FrameSpec
from sb3_extra_buffers.codecs.delta_words import DeltaWordsCodec, encode_numpy
from sb3_extra_buffers.codecs.rle import RleCodec
from sb3_extra_buffers.gpu_buffers.arena import HeapBudget
from sb3_extra_buffers.gpu_buffers.device_codecs import DeviceDelta, DeviceRle
from sb3_extra_buffers.gpu_buffers.frame_store import _NO_RECORDS, DeviceFrameStore
from sb3_extra_buffers.gpu_buffers.kernels import (
    LENGTH_BITS,
    REPORT_HEADER,
    DeviceFrames,
    ObservationBatch,
    kernel_module,
)
from sb3_extra_buffers.gpu_buffers.transfer import Observations, Places
from sb3_extra_buffers.storage.matching import append_new_frames
from sb3_extra_buffers.storage.stacking import MemoryForm, StackLayout

pytestmark = pytest.mark.usefixtures("kernels")
N_LANES = 2
CONTENTS = {
    "never changes": lambda frame, rng: frame,
    "changes a little": lambda frame, rng: _changed_at(frame, rng.integers(frame.size, size=3)),
    "changes at both ends": lambda frame, rng: _changed_at(frame, [0, -1]),
    "changes far apart": lambda frame, rng: _changed_at(frame, slice(None, None, 1500)),
    "changes everywhere": lambda frame, rng: rng.integers(0, 256, size=frame.shape, dtype=np.uint8),
    "is zero now and then": lambda frame, rng: frame * rng.integers(0, 2, dtype=np.uint8),
}


def _changed_at(frame: np.ndarray, places: object) -> np.ndarray:
    frame = frame.copy()
    frame[places] += 1
    return frame


def filled(
    size: int, content: str, n_frames: int, group: int, device: str, offset: int = 5
) -> tuple[DeviceFrames, np.ndarray, np.ndarray]:
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
    tensors = DeviceFrames.zeros(N_LANES, n_frames, size, group, 1, th.device(device))
    tensors = tensors._replace(
        records=th.zeros((N_LANES, n_frames // group, 2), dtype=th.int64, device=device),
        ring=th.tensor(ring, device=device),
        heads=th.tensor(first + n_frames, device=device),
        encoded=th.tensor(first, device=device),
    )
    tensors.known.fill_(1)
    tensors.report.fill_(77)
    return tensors, frames, first


def lengths_of(tensors: DeviceFrames) -> np.ndarray:
    """The lengths in the report, 0 where there is none; and what else it says is checked."""
    report = tensors.report.cpu().numpy()
    assert report[:, 0].tolist() == tensors.heads.tolist()
    assert report[:, 3].tolist() == tensors.encoded.tolist()
    assert report[:, 4].tolist() == tensors.references.tolist()
    counts = (report[:, 0] - report[:, 3]) // tensors.group
    lengths = report[:, REPORT_HEADER:]
    return np.where(np.arange(lengths.shape[1]) < counts[:, None], lengths, 0)


def ordered(tensors: DeviceFrames, lengths: np.ndarray, room: int) -> tuple[DeviceFrames, np.ndarray]:
    """Orders to write all records one after the other, from an odd place on. Returns where they start as well."""
    heap = th.full((int(lengths.sum()) + room,), 77, dtype=th.uint8, device=tensors.ring.device)
    sizes, of_lanes = lengths[lengths > 0], lengths.sum(1)
    begins = 3 + np.cumsum(of_lanes) - of_lanes
    orders = th.tensor(np.concatenate([begins, (lengths > 0).sum(1), np.zeros_like(begins)]), device=heap.device)
    return tensors._replace(heap=heap, orders=orders), 3 + np.cumsum(sizes) - sizes


def check_index(tensors: DeviceFrames, starts: np.ndarray, lengths: np.ndarray, first: np.ndarray) -> None:
    """Every record that was written is in the index."""
    lanes, records = np.nonzero(lengths)
    places = (first[lanes] // tensors.group + records) % tensors.records.shape[1]
    entries = tensors.records.cpu().numpy()[lanes, places]
    np.testing.assert_array_equal(entries[:, 0], starts)
    references = tensors.references.cpu().numpy()[lanes]
    np.testing.assert_array_equal(entries[:, 1], lengths[lanes, records] | references << LENGTH_BITS)
    assert tensors.encoded.tolist() == (first + tensors.group * (lengths > 0).sum(1)).tolist()


def records_of(heap: th.Tensor, starts: np.ndarray, lengths: np.ndarray) -> list[bytes]:
    data = heap.cpu().numpy()
    return [data[start : start + length].tobytes() for start, length in zip(starts, lengths, strict=True)]


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(("size", "group"), [(1, 1), (7, 3), (1501, 1), (1501, 3)])
def test_delta_records(size: int, group: int, content: str, device: str) -> None:
    check_delta(size, content, group, device)


@pytest.mark.skipif(not th.cuda.is_available(), reason="Triton's interpreter would take minutes")
@pytest.mark.parametrize("content", ["changes a little", "changes everywhere"])
def test_delta_records_of_a_million_and_three_bytes(content: str) -> None:
    check_delta(1_000_003, content, 1, "cuda")


def check_delta(size: int, content: str, group: int, device: str) -> None:
    tensors, frames, first = filled(size, content, 2 * group, group, device, offset=group)
    codec = DeltaWordsCodec(FrameSpec(size, np.dtype(np.uint8)), frames_per_record=group)
    references = np.array([1, 0])
    bases = np.stack([np.zeros_like(frames[0, 0]), frames[0, 0]])
    words = codec._as_words(np.repeat(bases[:, None], group, 1))[:, 0]
    tensors = tensors._replace(
        table=th.tensor(words.view(np.int32), device=device), references=th.tensor(references, device=device)
    )
    tensors.heads[1] -= 1  # its last record is not complete
    module = kernel_module("delta")
    module.measure_delta(tensors)
    lengths = lengths_of(tensors)
    assert (lengths[0] > 0).all()
    assert lengths[1, -1] == 0
    tensors, starts = ordered(tensors, lengths, size * group + 3)
    module.write_delta(tensors)
    heap = tensors.heap
    found = records_of(heap, starts, lengths[lengths > 0])
    records = frames.reshape(N_LANES, -1, group * size)
    for lane in range(N_LANES):
        n_records = int((lengths[lane] > 0).sum())
        base = np.repeat(words[references[lane]][None], n_records, 0)
        data, sizes = encode_numpy(codec._as_words(records[lane, :n_records]), base, size)
        ends = np.cumsum(sizes)
        expected = [data[end - length : end].tobytes() for end, length in zip(ends, sizes, strict=True)]
        assert [found.pop(0) for _ in range(n_records)] == expected
    check_index(tensors, starts, lengths, first)
    assert heap[:3].tolist() == [77] * 3
    assert heap[int(lengths.sum()) + 3] == 77 or size * group == 1


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(
    ("size", "dtype", "runs_type"),
    [
        (1, np.uint8, None), (300, np.uint8, None), (300, np.uint8, np.uint8), (300, np.uint8, np.uint32),
        (20, np.int16, None), (10, np.float32, np.uint8), (6, np.int64, np.uint32),
    ],
)  # fmt: skip
def test_rle_records(size: int, dtype: type, runs_type: type | None, content: str, device: str) -> None:
    codec = RleCodec(FrameSpec(size, np.dtype(dtype)), runs_type=runs_type)
    tensors, frames, first = filled(codec.record_bytes, content, 3, 1, device)
    form = codec.runs_type.itemsize, codec.element_type.itemsize, codec.longest_run
    module = kernel_module("rle")
    module.measure_rle(tensors, *form)
    lengths = lengths_of(tensors)
    tensors, starts = ordered(tensors, lengths, codec.record_bytes + 3)
    module.write_rle(tensors, *form)
    data, sizes, _ = codec.encode(frames.reshape(-1, codec.record_bytes), np.zeros(6, np.int64))
    assert lengths.reshape(-1).tolist() == sizes.tolist()
    assert b"".join(records_of(tensors.heap, starts, sizes)) == data.tobytes()
    check_index(tensors, starts, lengths, first)


def test_only_the_first_records_of_each_lane(device: str) -> None:
    tensors, _, first = filled(300, "changes a little", 6, 1, device)
    module, form = kernel_module("rle"), (2, 1, 65535)
    module.measure_rle(tensors, *form)
    lengths = lengths_of(tensors)
    lengths[:, 4:] = 0
    tensors, _ = ordered(tensors, lengths, 303)
    sizes = lengths[lengths > 0]
    module.write_rle(tensors, *form)
    check_index(tensors, 3 + np.cumsum(sizes) - sizes, lengths, first)
    assert not tensors.heap[3 : 3 + int(sizes.sum())].eq(77).all()
    assert tensors.heap[3 + int(sizes.sum()) :].eq(77).all()


@pytest.mark.parametrize("content", CONTENTS)
def test_a_newer_reference(content: str, device: str) -> None:
    """What it would save is measured; then the newest frame becomes the reference."""
    tensors, frames, _ = filled(1501, content, 12, 1, device)
    bases = np.zeros((3, 1504), np.uint8)
    bases[:2, :1501] = frames[:, 0]
    tensors = tensors._replace(
        table=th.tensor(bases.view(np.int32), device=device), references=th.tensor([0, 1], device=device)
    )
    module = kernel_module("delta")
    module.measure_delta(tensors)
    words = np.pad(frames, ((0, 0), (0, 0), (0, 3))).view(np.int32)
    for lane, (newest, newer, oldest) in enumerate(zip(words[:, -1], words[:, -9], words[:, 0], strict=True)):
        saved = np.count_nonzero(newest != oldest) - np.count_nonzero(newest != newer)
        assert tensors.report[lane, 1] == (saved if newest.any() else 0)
    tensors.orders.copy_(th.tensor([0, 0, 0, 0, 0, 2], device=device))
    module.write_delta(tensors)
    np.testing.assert_array_equal(tensors.table[2].cpu().numpy(), words[1, -1])
    assert tensors.references.tolist() == [0, 2]


@pytest.mark.parametrize("head", [0, 1, 5])
def test_a_lane_with_few_frames_has_no_newer_reference(head: int, device: str) -> None:
    tensors, frames, _ = filled(9, "changes a little", 12, 1, device, offset=0)
    bases = th.zeros((2, 3), dtype=th.int32, device=device)
    tensors = tensors._replace(table=bases, heads=th.full((N_LANES,), head, device=device))
    module = kernel_module("delta")
    module.measure_delta(tensors)
    assert tensors.report[:, 0].tolist() == [head] * N_LANES
    words = np.pad(frames, ((0, 0), (0, 0), (0, 3))).view(np.int32)
    newest, oldest = words[:, max(head - 1, 0)], words[:, 0]
    saved = np.count_nonzero(newest, axis=1) - np.count_nonzero(newest != oldest, axis=1)
    assert tensors.report[:, 1].tolist() == saved.tolist()


@pytest.mark.parametrize("n_slots", [1, 7, 2500])
@pytest.mark.parametrize("pair", [False, True])
def test_the_oldest_observations(n_slots: int, pair: bool, device: str) -> None:
    tensors, *_ = filled(3, "never changes", 4, 1, device)
    kernel_module("delta").measure_delta(tensors._replace(table=th.zeros((1, 1), dtype=th.int32, device=device)))
    ends = (
        np.random.default_rng(0).integers(2**31 - 50, 2**31 + 50, size=(1 + pair, n_slots, N_LANES)).astype(np.uint32)
    )
    ends[-1, n_slots // 2] = 0  # never written
    columns = [th.tensor(column.view(np.int32), device=device) for column in ends]
    kernel_module("append").find_oldest(tensors, columns)
    written = np.where(ends == 0, 2**32, ends.astype(np.int64))
    assert tensors.report[:, 2].tolist() == written.min((0, 1)).tolist()


FORMS = {
    "channels first": lambda size: MemoryForm(1, size, size),
    "channels last": lambda size: MemoryForm(size, 1, 1),
    "two channels last": lambda size: MemoryForm(size // 2, 2, 1),
    "pairs of bytes": lambda size: MemoryForm(size // 2, 2, 2),
}


def in_form(observations: np.ndarray, form: MemoryForm) -> np.ndarray:
    """Observations, (n, stack, frame_bytes), as they lie in memory."""
    n, stack, _ = observations.shape
    parts = observations.reshape(n, stack, form.chunk // form.item, form.pixels, form.item)
    return np.ascontiguousarray(parts.transpose(0, 3, 1, 2, 4)).reshape(n, -1)


@pytest.mark.parametrize("layout", FORMS)
@pytest.mark.parametrize("size", [1, 6, 8, 50])
@pytest.mark.parametrize("pair", [False, True])
def test_observations_share_frames_as_on_the_host(size: int, pair: bool, layout: str, device: str) -> None:
    form = FORMS[layout](size)
    if form.pixels == 0:
        pytest.skip("too small")
    rng, stack, n_frames, n_slots = np.random.default_rng(0), 3, 8, 9
    tensors, *_ = filled(size, "never changes", n_frames, 1, device)
    ring, heads = np.zeros((N_LANES, n_frames, size), np.uint8), np.array([4, 0])
    tensors = tensors._replace(stack=stack, heads=th.tensor(heads, device=device), ring=th.zeros_like(tensors.ring))
    tensors.known.zero_()
    progress = th.zeros(N_LANES, dtype=th.int64, device=device)
    newest, known = np.zeros((N_LANES, stack * size), np.uint8), np.zeros(N_LANES, np.bool_)
    columns = [th.zeros((n_slots, N_LANES), dtype=th.int32, device=device) for _ in range(1 + pair)]
    now = rng.integers(0, 2, size=(N_LANES, stack, size), dtype=np.uint8)
    for slot in range(n_slots):
        lanes = np.arange(N_LANES) if slot % 3 else np.array([1])  # also of one lane alone
        observations = []
        # Often the first of two is known to be the newest one, and is not sent again.
        continues = pair and slot > 2 and len(lanes) == N_LANES
        for column in range(len(columns)):
            for lane in [] if continues and column == 0 else lanes:  # any number of new frames, often none or one
                new = int(rng.integers(0, stack + 1)) if rng.random() < 0.5 else 1
                fresh = rng.integers(0, 2, size=(new, size), dtype=np.uint8)
                now[lane] = np.concatenate([now[lane, new:], fresh])
            observations.append(now[lanes])
        parts = [th.tensor(in_form(part, form), device=device) for part in observations[continues:]]
        kernel_module("append").append_observations(
            tensors, th.tensor(lanes, device=device), Observations(parts, form, continues), columns,
            [slot] * len(columns), progress, slot,
        )  # fmt: skip
        for column, part in zip(columns, observations, strict=True):
            ends, memory = np.empty((1, len(lanes)), np.int64), part.reshape(len(lanes), -1)
            append_new_frames(
                lanes, memory, memory, 1, size, size, stack, np.zeros((1, 1), np.uint64),
                newest, known, ring, heads, heads, ends,
            )  # fmt: skip
            assert column[slot, lanes].tolist() == ends[0].tolist()
        assert tensors.heads.tolist() == heads.tolist()
        assert (progress[lanes] == th.tensor(heads[lanes] | slot << 32, device=device)).all()
    np.testing.assert_array_equal(tensors.ring.cpu().numpy(), ring)


def stored(
    method: str, group: int, size: int, dtype: object, content: str, device: str, steps: int = 8
) -> tuple[DeviceFrameStore, np.ndarray, np.ndarray]:
    """A store with two lanes, and the frames that it got, as bytes."""
    layout = StackLayout((size,), np.dtype(dtype))
    codec: Any = DeviceDelta(layout.frame, frames_per_record=group) if method == "delta" else DeviceRle(layout.frame)
    store = DeviceFrameStore(codec, 2, layout, th.device(device), HeapBudget(None))
    rng = np.random.default_rng(0)
    now = rng.integers(0, 256, size=(2, layout.frame.nbytes), dtype=np.uint8)
    lanes, seen, ends = np.arange(2), [], []
    for _ in range(steps):
        now = np.stack([CONTENTS[content](frame, rng) for frame in now])
        ends.append(store.append(lanes, now.view(dtype), lambda: np.zeros(2, np.int64)))
        seen.append(now)
    store.settle()
    store.check()
    return store, np.stack(seen), np.stack(ends).astype(np.uint32)


def check_frames(store: DeviceFrameStore, seen: np.ndarray, ends: np.ndarray, batch: int = 3) -> None:
    """In one launch, the frames at some places and those at others."""
    rng = np.random.default_rng(1)
    slots, others = rng.integers(len(seen), size=(2, batch))
    lanes = rng.integers(2, size=batch)
    places = Places([slots, others], lanes, store.device)
    outs = [th.full((batch, store.codec.frame.nbytes), 77, dtype=th.uint8, device=store.device) for _ in range(2)]
    index = th.tensor(ends.view(np.int32), device=store.device)
    store.launch(ObservationBatch(places, [index, index], outs))
    for out, where in zip(outs, (slots, others), strict=True):
        np.testing.assert_array_equal(out.cpu().numpy(), seen[where, lanes])


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("size", [1, 7, 1001])
@pytest.mark.parametrize(("method", "group"), [("delta", 1), ("delta", 3), ("rle", 1)])
def test_frames_of_every_size(method: str, group: int, size: int, content: str, device: str) -> None:
    check_frames(*stored(method, group, size, np.uint8, content, device))


def test_an_index_that_has_grown_is_sent_before_records_are_written(device: str) -> None:
    store, seen, ends = stored("delta", 2, 7, np.uint8, "changes a little", device)
    store._grow_index()  # and then Ctrl-C came
    store._write_records(_NO_RECORDS, np.array([1]))
    store.check()
    check_frames(store, seen, ends)


@pytest.mark.parametrize("dtype", [np.int16, np.float32, np.float64])
@pytest.mark.parametrize(("method", "group"), [("delta", 2), ("rle", 1)])
def test_frames_of_every_dtype(method: str, group: int, dtype: object, device: str) -> None:
    check_frames(*stored(method, group, 37, dtype, "changes a little", device))


@pytest.mark.skipif(not th.cuda.is_available(), reason="Triton's interpreter would take minutes")
@pytest.mark.parametrize("content", ["changes a little", "changes everywhere"])
@pytest.mark.parametrize("method", ["delta", "rle"])
def test_a_frame_of_a_million_and_three_bytes(method: str, content: str) -> None:
    check_frames(*stored(method, 1, 1_000_003, np.uint8, content, "cuda", steps=3), batch=1)


def test_observations_that_were_never_written_are_zero(device: str) -> None:
    store, *_ = stored("delta", 1, 9, np.uint8, "changes a little", device)
    out = np.full((3, 1, 9), 77, np.uint8)
    store.gather(np.array([0, 1, 0]), np.full((1, 3), -1), [out])
    assert not out.any()
