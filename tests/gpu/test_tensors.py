"""Observations that are on the device already take the same way as those of the host, and may be mixed with them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch as th

from sb3_extra_buffers.codecs.delta_words import decode_numpy, encode_numpy
from sb3_extra_buffers.errors import ObservationError
from sb3_extra_buffers.gpu_buffers.transfer import Report
from tests.gpu.helpers import IMAGES, SPACES, recorded, replay_pair, rollout_pair
from tests.transitions import Transition, assert_same, copied, sample_both

pytestmark = pytest.mark.usefixtures("kernels")
METHODS = ["rle", "delta"]


def add(plain: Any, ours: Any, transition: Transition, device: str) -> None:
    plain.add(*copied(transition))
    obs, next_obs, *rest = copied(transition)
    ours.add(tensors(obs, device), tensors(next_obs, device), *rest)


def tensors(observations: Any, device: str) -> Any:
    if isinstance(observations, dict):
        return {key: th.tensor(part, device=device) for key, part in observations.items()}
    return th.tensor(observations, device=device)


@pytest.mark.parametrize("space", ["channels first", "channels last", "odd size", "uint16"])
@pytest.mark.parametrize("method", METHODS)
def test_replay(method: str, space: str, device: str) -> None:
    stack = min(SPACES[space].shape)
    buffers = replay_pair(SPACES[space], device, slots=9, compression_method=method, frame_stack=stack)
    for step, transition in enumerate(recorded(space, 2)[:20]):
        add(*buffers, transition, device)
        if step % 10 == 9:
            sample_both(*buffers, batch_size=3, seed=step)
    buffers[1].check()


def test_chains_of_frames_with_next_observations_that_are_saved(device: str) -> None:
    options = {"optimize_memory_usage": True, "handle_timeout_termination": False, "frame_stack": 4}
    chains = {"compression_method": "delta", "compression_kwargs": {"frames_per_record": 3}}
    buffers = replay_pair(IMAGES, device, slots=9, **options, **chains)
    for step, transition in enumerate(recorded("channels first", 2)[:30]):
        add(*buffers, transition, device)
        if step % 10 == 9:
            sample_both(*buffers, batch_size=3, seed=step)


def test_without_a_declared_stack(device: str) -> None:
    """The first steps are looked at on the host."""
    buffers = replay_pair(SPACES["Dict"], device)
    for step, transition in enumerate(recorded("Dict", 2)[:50]):
        add(*buffers, transition, device)
        if step % 20 == 0:
            sample_both(*buffers, batch_size=4, seed=step)


@pytest.mark.parametrize("method", METHODS)
def test_rollouts(method: str, device: str) -> None:
    plain, ours = rollout_pair(IMAGES, device, slots=6, compression_method=method, frame_stack=4)
    for first in (0, 6, 12):
        for buffer in (plain, ours):
            buffer.reset()
        for transition in recorded("channels first", 2)[first : first + 6]:
            rest = transition.action, transition.reward, transition.done, *map(th.tensor, (transition.reward,) * 2)
            plain.add(transition.obs.copy(), *rest)
            ours.add(tensors(transition.obs, device), *rest)
        batches = []
        for buffer in (plain, ours):
            np.random.seed(0)
            batches.append(tuple(buffer.get(8)))
        assert_same(*batches[::-1])


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
        buffers = replay_pair(IMAGES, device, slots=9, compression_method=method, frame_stack=4)
        for step, transition in enumerate(recorded("channels first", 2)[:40]):
            add(*buffers, transition, device)
            if step % 13 == 0:
                sample_both(*buffers, batch_size=4, seed=step)
        assert buffers[1]._stores[""].frames.arena.live_bytes > 0


@pytest.mark.parametrize("method", METHODS)
def test_observations_of_the_host_and_of_the_device_in_turns(method: str, device: str) -> None:
    plain, ours = replay_pair(IMAGES, device, slots=9, compression_method=method, frame_stack=4)
    for step, transition in enumerate(recorded("channels first", 2)[:30]):
        obs, next_obs, *rest = copied(transition)
        plain.add(obs, next_obs, *rest)
        if step % 3 != 0:
            obs = tensors(obs, device)
        if step % 4 != 0:
            next_obs = tensors(next_obs, device)
        ours.add(obs, next_obs, *rest)
        if step % 10 == 9:
            sample_both(plain, ours, batch_size=4, seed=step)


def test_observations_by_index(device: str) -> None:
    plain, ours = replay_pair(IMAGES, device, slots=9, compression_method="delta", frame_stack=4)
    for step, transition in enumerate(recorded("channels first", 2)[:20]):
        add(plain, ours, transition, device)
        if step % 9 == 8:
            assert_same(ours.next_observations[:3], plain.next_observations[:3])
    slots, envs = np.array([3, 5]), np.array([1, 0])
    assert_same(ours.observations[slots, envs], plain.observations[slots, envs])
    for buffer in (plain, ours):
        buffer.observations[5] = plain.observations[7]
        buffer.observations[2, 1] = plain.observations[7, 0]
    sample_both(plain, ours, batch_size=20, seed=0)
    ours.check()


@pytest.mark.parametrize("space", sorted(SPACES.keys() - {"Dict"}))
def test_observations_that_are_written_by_index_without_a_codec(space: str, device: str) -> None:
    plain, ours = replay_pair(SPACES[space], device, slots=9, compression_method="none")
    for transition in recorded(space, 2)[:12]:
        add(plain, ours, transition, device)
    for buffer in (plain, ours):
        buffer.observations[5] = plain.observations[7]
        buffer.next_observations[2, 1] = plain.observations[7, 0]
        buffer.observations[np.array([0, 3]), np.array([1, 0])] = plain.observations[6]
    sample_both(plain, ours, batch_size=20, seed=0)
    ours.check()


def test_records_are_those_of_the_codec(device: str) -> None:
    options = {"compression_kwargs": {"frames_per_record": 1}}
    _, ours = replay_pair(IMAGES, device, compression_method="delta", frame_stack=4, **options)
    for transition in recorded("channels first", 2)[:30]:
        ours.add(tensors(transition.obs, device), tensors(transition.next_obs, device), *copied(transition)[2:])
    store = ours._stores[""]
    store.state()
    frames, codec = store.frames, store.codec
    heap, n_bytes, seen = frames.arena.data, codec.frame.nbytes, 0
    for lane, number in itertools.product(range(2), range(10, 25)):
        start, length = frames.index.starts[lane, number], frames.index.lengths[lane, number]
        if length != n_bytes:
            base = codec.reference_frames[frames.index.references[lane, number]]
            record = heap[start : start + length]
            words = codec._as_words(decode_numpy(record, base, 1, n_bytes))
            assert encode_numpy(words, base[None], n_bytes)[0].tobytes() == record.tobytes()
            seen += 1
    assert seen > 3
    assert np.count_nonzero(codec._current) == 2, "both lanes have a reference"


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
def test_nothing_waits_for_the_device_cuda(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sb3_extra_buffers.gpu_buffers import frame_store

    monkeypatch.setattr(frame_store, "_RING_FRAMES", 500)  # a full ring is waited for
    plain, ours = replay_pair(IMAGES, "cuda", compression_method=method, frame_stack=4)
    transitions = recorded("channels first", 2)
    on_device = [(tensors(t.obs, "cuda"), tensors(t.next_obs, "cuda")) for t in transitions]
    for transition in transitions * 3:
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
