"""What each codec costs on recorded frames: bytes, time to encode a frame, time to read an observation.

    python -m benchmarks.studies.codecs                                    # about two minutes on a quiet core
    python -m benchmarks.studies.codecs --names mspacman,rgb --steps 500

Encoding and reading run in one thread. Observations are read in batches of 32, each with its next observation, as
``sample`` does. ``sb3`` indexes an array of all observations and copies the result to a tensor, as SB3's buffer does.
Times are 10th percentiles, because other processes only ever add to them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from benchmarks.environments import WORKLOADS
from benchmarks.recordings import load_recording, transitions
from benchmarks.studies.workloads import N_ENVS, names_of
from sb3_extra_buffers.codecs.base import Codec, Encoded, FrameSpec, Indices
from sb3_extra_buffers.codecs.delta import DeltaCodec
from sb3_extra_buffers.codecs.delta_words import DeltaWordsCodec
from sb3_extra_buffers.codecs.registry import create_codec
from sb3_extra_buffers.storage.frame_store import FrameStore
from sb3_extra_buffers.storage.stacking import StackLayout, detect_layout

CODECS: dict[str, Callable[[FrameSpec], Codec]] = {
    "none": partial(create_codec, "none"),
    "delta_words": DeltaWordsCodec,
    "delta": DeltaCodec,
    "delta x4": partial(DeltaCodec, frames_per_record=4),
    "bitpack": partial(create_codec, "bitpack"),
    "pixel-lz": partial(create_codec, "pixel-lz"),
    "delta-zstd": partial(create_codec, "delta-zstd"),
    "zstd-dict/9 x8": partial(create_codec, "zstd-dict/9", frames_per_record=8),
    "zstd-dict/3": partial(create_codec, "zstd-dict/3"),
}
BATCH_SIZE = 32
ROUNDS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", default="atari,rgb", help=f"workloads, or {', '.join(WORKLOADS)}")
    parser.add_argument("--steps", type=int, default=1000, help="steps of each environment (default: 1000)")
    arguments = parser.parse_args()
    th.set_num_threads(1)
    print("| workload | codec | bytes per frame | with references | encode, µs per frame | read, µs per observation |")
    print("|---|---|---|---|---|---|")
    for name in names_of(arguments.names.split(",")):
        recording = load_recording(name, arguments.steps, N_ENVS)
        steps = np.array([step.obs for step, _ in zip(transitions(recording), range(arguments.steps), strict=False)])
        layout = detect_layout(steps[:64])
        print(f"| {name} | sb3 | | | | {percentile(reads_of_sb3(steps)):.1f} |")
        for label, make in CODECS.items():
            codec, times = timed(make(layout.frame))
            store = fill(codec, layout, steps)
            n_frames = int(store.encoded.sum())
            frame_bytes = store.arena.live_bytes / n_frames
            print(
                f"| {name} | {label} | {frame_bytes:,.0f} | {frame_bytes + codec.reference_bytes / n_frames:,.0f} "
                f"| {percentile(times):.1f} | {percentile(reads_of(store)):.1f} |",
                flush=True,
            )


def percentile(seconds: list[float]) -> float:
    return 1e6 * float(np.percentile(seconds, 10))


def timed(codec: Codec) -> tuple[Codec, list[float]]:
    """Return the codec, and a list that collects the seconds per frame of each call of its ``encode``."""
    encode, times = codec.encode, []

    def measured(records: npt.NDArray[np.uint8], lanes: Indices) -> Encoded:
        began = time.perf_counter()
        encoded = encode(records, lanes)
        times.append((time.perf_counter() - began) / len(records) / codec.frames_per_record)
        return encoded

    codec.encode = measured  # type: ignore[method-assign]
    return codec, times


def fill(codec: Codec, layout: StackLayout, steps: npt.NDArray[Any]) -> FrameStore:
    store = FrameStore(codec, N_ENVS, layout)
    for observations in steps:
        store.append(np.arange(N_ENVS), np.ascontiguousarray(observations), lambda: np.zeros(N_ENVS, np.int64))
    return store


def reads_of(store: FrameStore) -> list[float]:
    """Seconds per observation, for each of many random batches."""
    layout, random = store.layout, np.random.default_rng(0)
    outs = [np.empty((BATCH_SIZE, layout.stack, layout.frame.nbytes), dtype=np.uint8) for _ in range(2)]
    calls = []
    for _ in range(ROUNDS):
        lanes = random.integers(0, N_ENVS, BATCH_SIZE)
        firsts = random.integers(0, store.encoded[lanes] - layout.stack - 1)
        calls.append(partial(store.gather, lanes, np.stack([firsts, firsts + 1]), outs))
    return seconds(calls)


def reads_of_sb3(steps: npt.NDArray[Any]) -> list[float]:
    random = np.random.default_rng(0)
    following = steps[1:].copy()  # SB3's buffer has a second array for next observations

    def read(slots: Indices, envs: Indices) -> None:
        for array in (steps, following):
            th.tensor(array[slots, envs, :])

    places = random.integers(0, [[len(following)], [N_ENVS]], (ROUNDS, 2, BATCH_SIZE))
    return seconds([partial(read, slots, envs) for slots, envs in places])


def seconds(calls: Sequence[Callable[[], object]]) -> list[float]:
    """The time that each call takes per observation."""
    times = []
    for call in calls:
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) / BATCH_SIZE / 2)
    return times


if __name__ == "__main__":
    main()
