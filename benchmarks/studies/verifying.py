"""What do ``verify=True`` and ``check()`` cost, on MsPacman?

    python -m benchmarks.studies.verifying

Buffers take turns in one process. All of them are full: ``add`` overwrites.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice

from stable_baselines3.common.buffers import ReplayBuffer

from benchmarks.recordings import load_recording, transitions
from benchmarks.report import markdown_table
from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.measure.buffers import Task
from sb3_extra_buffers.measure.comparison import time_buffers

N_ENVS = 4
BATCH_SIZES = (32, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transitions", type=int, default=12_000, help="transitions in a buffer (default: 12000)")
    size = parser.parse_args().transitions
    steps = size // N_ENVS
    recording = load_recording("mspacman", 2 * steps, N_ENVS)
    spaces = recording.observation_space, recording.action_space
    arguments = (size, *spaces, "cpu", N_ENVS)
    buffers = {
        "SB3": ReplayBuffer(*arguments),
        "auto": CompressedReplayBuffer(*arguments),
        "auto, verify=True": CompressedReplayBuffer(*arguments, verify=True),
    }
    played = transitions(recording)
    for transition in islice(played, steps):
        for buffer in buffers.values():
            buffer.add(*transition)
    task = Task("Replay", *spaces, N_ENVS)
    times = time_buffers(task, buffers, islice(played, steps), steps, BATCH_SIZES, repeats=300)
    heads = ("buffer", "`add`, µs", *(f"`sample({batch_size})`, µs" for batch_size in BATCH_SIZES))
    print(markdown_table(heads, [(name, *(f"{value:,.0f}" for value in times[name].values())) for name in buffers]))
    began = time.perf_counter()
    buffers["auto"].check()  # type: ignore[attr-defined]
    print(f"\ncheck() of {size:,} transitions: {1e3 * (time.perf_counter() - began):.1f} ms")


if __name__ == "__main__":
    main()
