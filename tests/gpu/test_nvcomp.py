"""Records of ``zstd`` on a GPU: nvCOMP gets compressed records and nothing else, which it would not survive."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

from sb3_extra_buffers.gpu_buffers import kernels, nvcomp
from tests.gpu.helpers import IMAGES, recorded, replay_pair
from tests.transitions import add_to_replay, sample_both

zstandard = pytest.importorskip("zstandard")


@pytest.fixture(params=["torch operations", "kernels"])
def batches(device: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of each batch that nvCOMP gets. Without a GPU, zstandard takes its place, and refuses other records."""
    if request.param == "kernels":
        pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "uses_triton", lambda device: request.param == "kernels")
    seen: list[int] = []
    decompress = nvcomp.decompress if nvcomp.is_available(th.device(device)) else _by_zstandard

    def spy(sources: th.Tensor, lengths: th.Tensor, targets: th.Tensor, record_bytes: int) -> None:
        seen.append(len(sources))
        decompress(sources, lengths, targets, record_bytes)

    if device == "cuda" and decompress is _by_zstandard:
        pytest.skip("needs nvCOMP")
    monkeypatch.setattr(nvcomp, "is_available", lambda device: True)
    monkeypatch.setattr(nvcomp, "decompress", spy)
    return seen


def _by_zstandard(sources: th.Tensor, lengths: th.Tensor, targets: th.Tensor, record_bytes: int) -> None:
    for source, length, target in th.stack([sources, lengths, targets], 1).tolist():
        frame = zstandard.ZstdDecompressor().decompress(ctypes.string_at(source, length), record_bytes)
        ctypes.memmove(target, frame, record_bytes)


def test_batches_are_decoded_in_one_call(batches: list[int], device: str) -> None:
    buffers = replay_pair(spaces.Box(0, 255, (4, 30, 30), np.uint8), device, compression_method="zstd", frame_stack=4)
    flat = np.zeros((2, 4, 30, 30), np.uint8)
    for step in range(60):
        flat = np.roll(flat, -1, axis=1)
        flat[:, -1] = step
        for buffer in buffers:
            buffer.add(flat, flat, np.zeros(2), np.zeros(2), np.zeros(2), [{}, {}])
    sample_both(*buffers, batch_size=20, seed=0)
    assert batches == [20 * 4 * 2]


@pytest.mark.parametrize("noise", [0.3, 1.0])
def test_raw_records_do_not_reach_it(noise: float, batches: list[int], device: str) -> None:
    buffers = replay_pair(IMAGES, device, compression_method="zstd", frame_stack=4)
    rng = np.random.default_rng(0)
    for step, transition in enumerate(recorded("channels first", 2)[:60]):
        pair: list[Any] = [transition.obs, transition.next_obs]
        if rng.random() < noise:
            pair = [rng.integers(0, 256, size=(2, *IMAGES.shape), dtype=np.uint8) for _ in range(2)]
        else:
            pair = [np.full((2, *IMAGES.shape), step, np.uint8)] * 2
        add_to_replay(buffers, transition._replace(obs=pair[0], next_obs=pair[1]))
        if step % 10 == 9:
            sample_both(*buffers, batch_size=40, seed=step)
    assert bool(batches) == (noise < 1)


def test_slots_that_were_never_written(batches: list[int], device: str) -> None:
    plain, ours = replay_pair(IMAGES, device, compression_method="zstd", frame_stack=4)
    flat = np.full((2, *IMAGES.shape), 9, np.uint8)
    for buffer in (plain, ours):
        buffer.add(flat, flat, np.zeros(2), np.zeros(2), np.zeros(2), [{}, {}])
    slots, envs = np.array([0, 5, 0]), np.array([1, 0, 0])
    np.testing.assert_array_equal(ours.observations[slots, envs], plain.observations[slots, envs])
