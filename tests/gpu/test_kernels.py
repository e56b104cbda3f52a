"""The kernels, their versions in torch and the host's NumPy reference rebuild the same frames."""

from __future__ import annotations

import numpy as np
import pytest
import torch as th

from sb3_extra_buffers.codecs.delta import DeltaCodec
from sb3_extra_buffers.codecs.registry import create_codec
from sb3_extra_buffers.gpu_buffers.delta_codec import BatchDeltaCodec
from sb3_extra_buffers.gpu_buffers.device_arena import HeapBudget
from sb3_extra_buffers.gpu_buffers.device_frame_store import DeviceFrameStore
from sb3_extra_buffers.gpu_buffers.kernels.batch import ObservationBatch
from sb3_extra_buffers.gpu_buffers.kernels.frames import windows
from sb3_extra_buffers.gpu_buffers.transfer import Outbox
from sb3_extra_buffers.storage.stacking import StackLayout

CONTENTS = {
    "never changes": lambda frame, rng: frame,
    "changes a little": lambda frame, rng: _changed(frame, rng, 3),
    "changes at both ends": lambda frame, rng: _changed_at(frame, [0, -1]),
    "changes far apart": lambda frame, rng: _changed_at(frame, slice(None, None, 1500)),
    "changes everywhere": lambda frame, rng: rng.integers(0, 256, size=frame.shape, dtype=np.uint8),
    "is zero now and then": lambda frame, rng: frame * rng.integers(0, 2, dtype=np.uint8),
}
METHODS = [("delta", 1), ("delta", 2), ("delta", 5), ("rle", 1)]
DTYPES = [np.uint8, np.int16, np.float32, np.float64]


def _changed(frame: np.ndarray, rng: np.random.Generator, count: int) -> np.ndarray:
    return _changed_at(frame, rng.integers(frame.size, size=count))


def _changed_at(frame: np.ndarray, places: object) -> np.ndarray:
    frame = frame.copy()
    frame[places] += 1
    return frame


def make_codec(method: str, group: int, layout: StackLayout) -> object:
    return (
        BatchDeltaCodec(layout.frame, frames_per_record=group)
        if method == "delta"
        else create_codec(method, layout.frame)
    )


def filled(method: str, group: int, size: int, dtype: object, content: str, device: str, steps: int = 11) -> tuple:
    """A store with two lanes, and the frames that it got, as bytes."""
    layout = StackLayout((size,), np.dtype(dtype))
    store = DeviceFrameStore(make_codec(method, group, layout), 2, layout, th.device(device), HeapBudget(None))
    rng = np.random.default_rng(0)
    now = rng.integers(0, 256, size=(2, layout.frame.nbytes), dtype=np.uint8)
    lanes, seen, ends = np.arange(2), [], []
    for _ in range(steps):
        now = np.stack([CONTENTS[content](frame, rng) for frame in now])
        ends.append(store.append(lanes, now.view(dtype), lambda: np.zeros(2, np.int64)))
        seen.append(now)
    store.encode_waiting(lambda: np.zeros(2, np.int64))
    with Outbox(store.device) as outbox:
        store.flush(outbox)
    return store, np.stack(seen), np.stack(ends).astype(np.uint32)


def by_kernel(
    store: DeviceFrameStore, ends: np.ndarray, slots: np.ndarray, others: np.ndarray, lanes: np.ndarray
) -> list:
    """The frames at ``slots`` and, in the same launch, those at ``others``."""
    places = th.tensor(np.stack([slots, others, lanes]), device=store.device)
    outs = [th.full((len(slots), store.codec.frame.nbytes), 77, dtype=th.uint8, device=store.device) for _ in range(2)]
    index = th.tensor(ends.view(np.int32), device=store.device)
    store.launch(ObservationBatch(places, [index, index], outs))
    return [out.cpu().numpy() for out in outs]


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("size", [1, 3, 4, 7, 64, 1001])
@pytest.mark.parametrize(("method", "group"), METHODS)
def test_frames_of_every_size(method: str, group: int, size: int, content: str, device: str) -> None:
    check(*filled(method, group, size, np.uint8, content, device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("method", "group"), METHODS)
def test_frames_of_every_dtype(method: str, group: int, dtype: object, device: str) -> None:
    check(*filled(method, group, 37, dtype, "changes a little", device))


@pytest.mark.parametrize("content", ["changes a little", "changes everywhere"])
@pytest.mark.parametrize("method", ["delta", "rle"])
def test_a_frame_of_a_million_and_three_bytes(method: str, content: str, device: str) -> None:
    check(*filled(method, 1, 1_000_003, np.uint8, content, device, steps=3), batch=1)


def test_observations_that_were_never_written_are_zero(device: str) -> None:
    pytest.importorskip("triton")
    store, _, ends = filled("delta", 1, 9, np.uint8, "changes a little", device)
    nothing = np.zeros_like(ends)
    for out in by_kernel(store, nothing, np.arange(3), np.arange(3), np.zeros(3, np.int64)):
        assert not out.any()


@pytest.mark.parametrize("group", [1, 3])
def test_batches_are_encoded_to_the_bytes_of_the_host(group: int) -> None:
    store, seen, _ = filled("delta", group, 50, np.uint8, "changes a little", "cpu")
    codec = DeltaCodec(store.codec.frame, frames_per_record=group)
    heap, rows = store.arena.data, np.zeros((1, codec.record_bytes), np.uint8)
    codec._frames = store.codec.reference_frames
    for lane in range(2):
        for record in range(int(store.encoded[lane]) // group):
            place = np.array([store.starts[lane, record]]), np.array([store.lengths[lane, record]], dtype=np.int64)
            codec.decode(heap, *place, np.array([store.references[lane, record]], dtype=np.int64), rows)
            numbers = range(record * group, (record + 1) * group)
            assert rows.tobytes() == b"".join(seen[number, lane].tobytes() for number in numbers)


def test_windows_at_the_end(device: str) -> None:
    heap = th.arange(10, dtype=th.uint8, device=device)
    assert windows(heap, th.tensor([0, 7], device=device), 3).tolist() == [[0, 1, 2], [7, 8, 9]]
    assert windows(heap, th.tensor([0], device=device), 20).shape == (1, 20)


def check(store: DeviceFrameStore, seen: np.ndarray, ends: np.ndarray, batch: int = 4) -> None:
    rng = np.random.default_rng(1)
    slots, others = rng.integers(len(seen), size=(2, batch))
    lanes = rng.integers(2, size=batch)
    expected = [seen[where, lanes] for where in (slots, others)]
    outs = [np.empty((batch, 1, store.codec.frame.nbytes), np.uint8) for _ in range(2)]
    firsts = [ends[where, lanes].astype(np.int64) - 1 for where in (slots, others)]
    store.gather(lanes, firsts, outs)
    for out, right in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(out[:, 0], right)
    pytest.importorskip("triton")
    for out, right in zip(by_kernel(store, ends, slots, others, lanes), expected, strict=True):
        np.testing.assert_array_equal(out, right)
