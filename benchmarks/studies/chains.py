"""How many frames should ``delta`` store per record? Memory and sampling time for several lengths.

python -m benchmarks.studies.chains --names mspacman,pong,breakout
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from benchmarks.recordings import Recording, load_recording, transitions
from benchmarks.report import markdown_table
from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.storage.observation_store import ObservationStore

LENGTHS = (1, 2, 4, 8, 16, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", default="mspacman", help="recordings, separated by commas")
    parser.add_argument("--steps", type=int, default=6_000, help="steps of each of 4 environments")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.names.split(","):
        recording = load_recording(name, arguments.steps)
        buffers = {length: make_buffer(recording, length) for length in LENGTHS}
        times: dict[int, list[float]] = {length: [] for length in LENGTHS}
        for repeat in range(100):
            for length, buffer in buffers.items():
                np.random.seed(repeat)
                began = time.perf_counter()
                buffer.sample(256)
                times[length].append(1e6 * (time.perf_counter() - began))
        for length, buffer in buffers.items():
            store = buffer._stores[""]
            assert isinstance(store, ObservationStore)
            frames = int(store.frames.encoded.sum())
            payload = buffer.memory_usage().payload / frames
            rows.append((name, str(length), f"{payload:.0f}", f"{statistics.median(times[length]):,.0f}"))
    print(markdown_table(("game", "frames per record", "payload, bytes per frame", "sample(256), µs"), rows))


def make_buffer(recording: Recording, length: int) -> CompressedReplayBuffer:
    """Create a buffer that holds the whole recording."""
    buffer = CompressedReplayBuffer(
        recording.steps * recording.n_envs,
        recording.observation_space,
        recording.action_space,
        "cpu",
        recording.n_envs,
        compression_method="delta",
        compression_kwargs={"frames_per_record": length},
    )
    for transition in transitions(recording):
        buffer.add(*transition)
    return buffer


if __name__ == "__main__":
    main()
