"""Observations that are on the device already are compared, encoded and kept there, and sampled as if from the host."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

from sb3_extra_buffers.codecs.delta import decode_numpy, encode_numpy
from sb3_extra_buffers.errors import CapacityError, ObservationError
from sb3_extra_buffers.gpu_buffers import device_writer, kernels
from sb3_extra_buffers.gpu_buffers.delta_codec import BatchDeltaCodec
from sb3_extra_buffers.gpu_buffers.device_writer import Report
from tests.gpu.helpers import IMAGES, SLOTS, SPACES, recorded, replay_pair, rollout_pair
from tests.transitions import Transition, assert_same, copied, play, sample_both

METHODS = ["rle", "delta"]


@pytest.fixture(autouse=True)
def _on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU are otherwise arrays, which the host encodes faster."""
    monkeypatch.setattr(device_writer, "encodes_on", lambda device, codec: codec.name != "zstd")


@pytest.fixture(params=["plain", "by kernel"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "by kernel":
        pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "uses_triton", lambda device: request.param == "by kernel")
    return request.param


def add(plain: Any, ours: Any, transition: Transition, device: str) -> None:
    plain.add(*copied(transition))
    obs, next_obs, *rest = copied(transition)
    ours.add(tensors(obs, device), tensors(next_obs, device), *rest)


def tensors(observations: Any, device: str) -> Any:
    if isinstance(observations, dict):
        return {key: th.tensor(part, device=device) for key, part in observations.items()}
    return th.tensor(observations, device=device)


def is_ahead(buffer: Any) -> bool:
    return buffer._stores[""].frames.is_ahead


@pytest.mark.parametrize("space", ["channels first", "channels last", "odd size", "uint16"])
@pytest.mark.parametrize("method", METHODS)
def test_replay(method: str, space: str, way: str, device: str) -> None:
    stack = min(SPACES[space].shape)
    buffers = replay_pair(SPACES[space], device, compression_method=method, frame_stack=stack)
    few = way == "by kernel" and device == "cpu"
    for step, transition in enumerate(recorded(space, 2)[: 45 if few else 110], start=1):
        add(*buffers, transition, device)
        if step in (1, 10, 35, 44, 110):
            sample_both(*buffers, batch_size=3 if few else 40, seed=step)
    assert is_ahead(buffers[1])


@pytest.mark.parametrize("group", [2, 3, 16])
def test_chains_of_frames(group: int, device: str) -> None:
    options = {"compression_method": "delta", "compression_kwargs": {"frames_per_record": group}, "frame_stack": 4}
    buffers = replay_pair(IMAGES, device, **options)
    for step, transition in enumerate(recorded("channels first", 2)):
        add(*buffers, transition, device)
        if step % 9 == 0:
            sample_both(*buffers, batch_size=40, seed=step)


def test_next_observations_that_are_saved(device: str) -> None:
    options = {"optimize_memory_usage": True, "handle_timeout_termination": False, "frame_stack": 4}
    buffers = replay_pair(IMAGES, device, compression_method="delta", **options)
    for step, transition in enumerate(recorded("channels first", 2)):
        add(*buffers, transition, device)
        if step % 9 == 8:
            sample_both(*buffers, batch_size=40, seed=step)


@pytest.mark.parametrize("space", ["channels first", "Dict"])
def test_without_a_declared_stack(space: str, device: str) -> None:
    """The first steps are looked at on the host."""
    buffers = replay_pair(SPACES[space], device)
    for step, transition in enumerate(recorded(space, 2)):
        add(*buffers, transition, device)
        if step % 20 == 0:
            sample_both(*buffers, batch_size=40, seed=step)


@pytest.mark.parametrize("method", METHODS)
def test_rollouts(method: str, device: str) -> None:
    plain, ours = rollout_pair(IMAGES, device, compression_method=method, frame_stack=4)
    for first in (0, SLOTS, 2 * SLOTS):
        for buffer in (plain, ours):
            buffer.reset()
        for transition in recorded("channels first", 2)[first : first + SLOTS]:
            rest = transition.action, transition.reward, transition.done, *map(th.tensor, (transition.reward,) * 2)
            plain.add(transition.obs.copy(), *rest)
            ours.add(tensors(transition.obs, device), *rest)
        for batch_size in (16, None):
            batches = []
            for buffer in (plain, ours):
                np.random.seed(0)
                batches.append(tuple(buffer.get(batch_size)))
            assert_same(*batches[::-1])
    assert is_ahead(ours)


class TestReports:
    """Which may take their time."""

    @pytest.mark.parametrize("method", METHODS)
    def test_that_are_late(self, method: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        looks = itertools.count()
        monkeypatch.setattr(Report, "has_arrived", property(lambda self: next(looks) % 7 == 6))
        self.check(method, device)

    @pytest.mark.parametrize("method", METHODS)
    def test_that_never_arrive_unless_waited_for(
        self, method: str, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Report, "has_arrived", False)
        self.check(method, device)

    def check(self, method: str, device: str) -> None:
        buffers = replay_pair(IMAGES, device, compression_method=method, frame_stack=4)
        for step, transition in enumerate(recorded("channels first", 2) * 2):
            add(*buffers, transition, device)
            if step % 10 == 0:
                sample_both(*buffers, batch_size=40, seed=step)
        assert buffers[1]._stores[""].frames.arena.live_bytes > 0


class TestHandingOver:
    def buffers(self, device: str, method: str = "delta", n: int = 50) -> list[Any]:
        buffers = replay_pair(IMAGES, device, compression_method=method, frame_stack=4)
        for transition in recorded("channels first", 2)[:n]:
            add(*buffers, transition, device)
        assert is_ahead(buffers[1])
        return buffers

    @pytest.mark.parametrize("method", METHODS)
    def test_to_the_host_and_back(self, method: str, device: str) -> None:
        buffers = self.buffers(device, method)
        for step, transition in enumerate(recorded("channels first", 2)[50:]):
            if step % 6 < 3:
                for buffer in buffers:
                    buffer.add(*copied(transition))
            else:
                add(*buffers, transition, device)
            assert is_ahead(buffers[1]) == (step % 6 >= 3)
            sample_both(*buffers, batch_size=30, seed=step)

    def test_one_observation_from_each(self, device: str) -> None:
        plain, ours = self.buffers(device)
        for transition in recorded("channels first", 2)[50:70]:
            plain.add(*copied(transition))
            obs, next_obs, *rest = copied(transition)
            ours.add(tensors(obs, device), next_obs, *rest)
        sample_both(plain, ours, batch_size=60, seed=0)

    @pytest.mark.parametrize("method", METHODS)
    def test_saved_and_loaded(self, method: str, device: str) -> None:
        plain, ours = self.buffers(device, method)
        again = copy.deepcopy(pickle.loads(pickle.dumps(ours)))
        for transition in recorded("channels first", 2)[50:80]:
            add(plain, again, transition, device)
        sample_both(plain, again, batch_size=60, seed=0)

    def test_observations_by_index(self, device: str) -> None:
        plain, ours = self.buffers(device)
        assert_same(ours.observations[3], plain.observations[3])
        slots, envs = np.array([13, 35]), np.array([1, 0])
        assert_same(ours.next_observations[slots, envs], plain.next_observations[slots, envs])
        assert is_ahead(ours)
        ours.observations[5] = plain.observations[5] = plain.observations[7]
        sample_both(plain, ours, batch_size=60, seed=0)


@pytest.mark.parametrize("method", METHODS)
def test_observations_by_index_while_a_report_is_under_way(method: str, device: str) -> None:
    """Which slots were written is known to the report, and not yet to the host."""
    plain, ours = replay_pair(IMAGES, device, compression_method=method, frame_stack=4)
    for step, transition in enumerate(recorded("channels first", 2)):
        add(plain, ours, transition, device)
        if step % 7 == 0:  # so that there is one at times
            for name in ("observations", "next_observations"):
                assert_same(getattr(ours, name)[:], getattr(plain, name)[:])


def test_checksums_are_those_of_the_newest_observations(device: str) -> None:
    plain, ours = replay_pair(IMAGES, device, compression_method="delta", frame_stack=4, verify=True)
    for step, transition in enumerate(recorded("channels first", 2)):
        if step % 50 < 40:  # from the host, and then from the device
            plain.add(*copied(transition))
            ours.add(*copied(transition))
        else:
            add(plain, ours, transition, device)
        if step % 7 == 0:
            assert_same(ours.observations[:], plain.observations[:])


def test_records_are_those_of_the_codec(device: str) -> None:
    _, ours = replay_pair(IMAGES, device, compression_method="delta", frame_stack=4)
    for transition in recorded("channels first", 2):
        ours.add(tensors(transition.obs, device), tensors(transition.next_obs, device), *copied(transition)[2:])
    store = ours._stores[""]
    store._take_back()
    frames, codec = store.frames, store.codec
    assert isinstance(codec, BatchDeltaCodec)
    heap, n_bytes, seen = frames.arena.data, codec.frame.nbytes, 0
    for lane, number in itertools.product(range(2), range(40, 60)):
        slot = number % frames.starts.shape[1]
        start, length = frames.starts[lane, slot], frames.lengths[lane, slot]
        if length != n_bytes:
            base = codec.reference_frames[frames.references[lane, slot]]
            record = heap[start : start + length]
            words = codec._as_words(decode_numpy(record, base, 1, n_bytes))
            assert encode_numpy(words, base[None], n_bytes)[0].tobytes() == record.tobytes()
            seen += 1
    assert seen > 10
    assert np.count_nonzero(codec._current) == 2, "both lanes have a reference"


def test_a_limit_is_kept_and_what_was_stored_stays(device: str) -> None:
    space = spaces.Box(0, 255, (4, 20, 20), np.uint8)
    plain, ours = replay_pair(space, device, slots=400, compression_method="delta", heap_bytes=60_000, frame_stack=4)
    rng, failures = np.random.default_rng(0), 0
    for transition in itertools.islice(play(space, 2), 200):
        noise = [rng.integers(0, 256, size=(2, *space.shape), dtype=np.uint8) for _ in range(2)]
        try:
            ours.add(*[tensors(part, device) for part in noise], *transition[2:])
        except CapacityError:
            failures += 1
            sample_both(plain, ours, batch_size=50, seed=failures)
            if failures == 3:
                break
        else:
            plain.add(*noise, *transition[2:])
    assert failures == 3
    assert ours.pos == plain.pos > 5


def test_observations_that_do_not_fit_are_refused(device: str) -> None:
    _, ours = replay_pair(IMAGES, device, compression_method="delta", frame_stack=4)
    wrong = th.zeros((2, 4, 8, 10), dtype=th.uint8, device=device)
    with pytest.raises(ObservationError):
        ours.add(wrong, wrong, np.zeros(2), np.zeros(2), np.zeros(2), [{}, {}])
    other = th.full((2, *IMAGES.shape), 7, dtype=th.int64, device=device)  # cast by the host
    ours.add(other, other, np.zeros(2), np.zeros(2), np.zeros(2), [{}, {}])
    assert ours.sample(2).observations.unique().tolist() == [7]


@pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["none", *METHODS])
def test_nothing_waits_for_the_device_cuda(method: str) -> None:
    plain, ours = replay_pair(IMAGES, "cuda", compression_method=method, frame_stack=4)
    transitions = recorded("channels first", 2)
    on_device = [(tensors(t.obs, "cuda"), tensors(t.next_obs, "cuda")) for t in transitions]
    for transition in transitions:
        add(plain, ours, transition, "cuda")
    ours.sample(8)  # compiles
    th.cuda.synchronize()
    th.cuda.set_sync_debug_mode("error")
    try:
        for transition, pair in zip(transitions, on_device, strict=True):
            ours.add(*pair, *transition[2:])
            ours.sample(8)
    finally:
        th.cuda.set_sync_debug_mode("default")
    for transition in transitions:
        plain.add(*copied(transition))
    sample_both(plain, ours, batch_size=60, seed=0)
