"""Files in which all checksums are right, but not the records: an error, or the right values, and nothing else.

Kernels trust records and index. On a GPU a wrong one would be an illegal memory access, which ends the process.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sb3_extra_buffers.errors import CorruptDataError, ExtraBuffersError
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer
from sb3_extra_buffers.gpu_buffers.frame_store import DeviceFrameStore
from sb3_extra_buffers.persistence.container import Container, write

SPACE = spaces.Box(0, 255, (4, 8, 9), np.uint8)
METHODS = [("delta", 1), ("delta", 3), ("rle", 1), ("zstd", 1)]
N_ENVS = 2


@functools.cache
def saved(method: str, group: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What is in the file of a buffer whose records are compressed, most of them. It was in host memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        return _saved(method, group)


def _saved(method: str, group: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    options = {"frames_per_record": group} if group > 1 else {}
    buffer = GpuReplayBuffer(
        40 * N_ENVS, SPACE, spaces.Discrete(3), "cpu", N_ENVS,
        compression_method=method, compression_kwargs=options, frame_stack=4,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    stacks = np.zeros((N_ENVS, *SPACE.shape), np.uint8)
    for step in range(70):
        frame = np.zeros((N_ENVS, 1, 8, 9), np.uint8)
        frame[:, 0, rng.integers(8), : rng.integers(9)] = 1 + step % 200
        following = np.concatenate([stacks[:, 1:], frame], axis=1)
        buffer.add(stacks, following, np.zeros((N_ENVS, 1)), np.zeros(N_ENVS), np.zeros(N_ENVS), [{}] * N_ENVS)
        stacks = following
    frames: Any = buffer._stores[""].frames
    assert (frames.index.lengths != frames.codec.record_bytes).mean() > 0.8, "there is something to decode"
    with tempfile.TemporaryDirectory() as folder:
        buffer.save(Path(folder) / "buffer")
        with Container.open(Path(folder) / "buffer") as file:
            return file.meta, {name: file.read(name).copy() for name in file.arrays}


def load(method: str, group: int, changed: dict[str, np.ndarray], device: str) -> Any:
    meta, arrays = saved(method, group)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "buffer", meta, {**arrays, **changed}, lambda _: None)
        return GpuReplayBuffer.load(Path(folder) / "buffer", device)


def array_named(method: str, group: int, ending: str) -> tuple[str, np.ndarray]:
    arrays = saved(method, group)[1]
    name = next(name for name in arrays if name.endswith(ending))
    return name, arrays[name].copy()


def check_all(buffer: Any) -> None:
    """Observations of which all frames are in records, by the codec's own decoder and as the buffer reads them."""
    frames = buffer._stores[""].frames
    codec, group, stack = frames.codec, frames.codec.frames_per_record, 4
    capacity, data = frames.index.capacity, frames.arena.data
    firsts, lanes, expected = [], [], []
    for lane in range(N_ENVS):
        records = np.arange(frames.first_records[lane], frames.encoded[lane] // group)
        if len(records) * group < stack:
            continue
        rows = np.empty((len(records), codec.record_bytes), np.uint8)
        parts = (
            part[lane, records % capacity].astype(np.int64)
            for part in (frames.index.starts, frames.index.lengths, frames.index.references)
        )
        codec.decode(data, *parts, rows)
        decoded = rows.reshape(-1, codec.frame.nbytes)
        for first in range(0, len(decoded) - stack + 1, 20 if is_interpreted(frames) else 5):
            firsts.append(records[0] * group + first)
            lanes.append(lane)
            expected.append(decoded[first : first + stack])
    if firsts:
        out = np.empty((len(firsts), stack, codec.frame.nbytes), np.uint8)
        frames.gather(np.array(lanes), np.array(firsts)[None], [out])
        np.testing.assert_array_equal(out, expected)


def is_interpreted(frames: Any) -> bool:
    return isinstance(frames, DeviceFrameStore) and frames.device.type == "cpu"


@pytest.mark.parametrize(("method", "group"), METHODS)
def test_what_was_saved_is_read_back(method: str, group: int, either_way: str, device: str) -> None:
    check_all(load(method, group, {}, device))


BAD = {
    "delta": [[255, 255, 255, 63], [255, 255, 255, 255], [1, 0, 0, 192], [0, 0, 0, 0], [200, 0, 0, 0]],
    "rle": [[255] * 4, [0, 0, 0, 0], [72, 72, 72, 72]],
    "zstd": [list(range(4, 30)), [40, 181, 47, 253, 255, 255], [0x50, 0x2A, 0x4D, 0x18, 1, 0, 0, 0, 7]],
}


@pytest.mark.parametrize(("method", "group", "bad"), [(*way, bad) for way in METHODS for bad in BAD[way[0]]])
def test_records_that_could_not_have_been_written_are_refused(
    method: str, group: int, bad: list[int], kernels: None, device: str
) -> None:
    if method == "zstd":
        pytest.skip("in host memory, where records are checked when they are decoded")
    name, heap = array_named(method, group, "arena/bytes")
    starts, lengths = (array_named(method, group, f"frames/{part}")[1] for part in ("starts", "lengths"))
    encoded, first = (array_named(method, group, f"frames/{part}")[1] for part in ("encoded", "first_records"))
    live = np.arange(first[0], encoded[0] // group) % starts.shape[1]
    possible = [place for place in live if len(bad) <= lengths[0, place] < group * 72]
    start = next(at for at in starts[0, possible].tolist() if heap[at : at + len(bad)].tolist() != bad)
    heap[start : start + len(bad)] = bad
    with pytest.raises(CorruptDataError):
        load(method, group, {name: heap}, device)


@pytest.mark.parametrize("start", [-1, 1 << 40, 2**63 - 1])
@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize(("method", "group"), METHODS[:3])
@pytest.mark.usefixtures("kernels")
def test_records_outside_the_arena_are_refused(method: str, group: int, is_raw: bool, start: int, device: str) -> None:
    name, starts = array_named(method, group, "frames/starts")
    lengths, encoded = (array_named(method, group, f"frames/{part}") for part in ("lengths", "encoded"))
    newest = (0, (encoded[1][0] // group - 1) % starts.shape[1])
    starts[newest] = start
    lengths[1][newest] = group * 72 if is_raw else group * 4
    with pytest.raises(CorruptDataError, match="outside the arena"):
        load(method, group, {name: starts, lengths[0]: lengths[1]}, device)


@pytest.mark.parametrize(("method", "group"), METHODS)
@pytest.mark.usefixtures("kernels")
@given(data=st.data())
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_bytes_of_any_part(method: str, group: int, data: st.DataObject) -> None:
    device = "cuda" if th.cuda.is_available() else "cpu"
    parts = ["arena/bytes", "starts", "lengths", "references", "encoded", "heads", "first_records", "ends/0"]
    available = [part for part in parts if any(name.endswith(part) for name in saved(method, group)[1])]
    changed = {}
    for part in data.draw(st.lists(st.sampled_from(available), min_size=1, max_size=2, unique=True)):
        name, array = array_named(method, group, part)
        flat = array.reshape(-1).view(np.uint8)
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, max(len(flat) - 1, 0)))
            some = data.draw(st.binary(min_size=1, max_size=6))
            flat[at : at + len(some)] = np.frombuffer(some, np.uint8)[: len(flat) - at]
        changed[name] = array
    try:
        buffer = load(method, group, changed, device)
    except (ExtraBuffersError, ValueError, IndexError, OverflowError):
        return
    if method == "zstd":  # in host memory, where records are checked when they are decoded
        with contextlib.suppress(ExtraBuffersError):
            buffer.sample(20)
        return
    buffer.sample(2)
    check_all(buffer)
