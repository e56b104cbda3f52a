"""Saving and loading MsPacman transitions, compared with pickling SB3's buffer; and a large buffer on disk.

    python -m benchmarks.studies.persistence                      # 200,000 transitions, SB3 with a quarter of them
    python -m benchmarks.studies.persistence --disk 5000000       # a buffer on disk, filled one and a half times

Each row is measured in a fresh process. Memory is the peak beyond the memory of the buffer itself.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl

from benchmarks.recordings import Transition, load_recording, transitions
from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.measure.memory import peak_rss, rss, settled_rss
from sb3_extra_buffers.measure.processes import run_in_fresh_process

N_ENVS = 4
_STEPS = 25_000


class Measured(NamedTuple):
    """The time of saving or loading, its peak memory beyond the buffer, and the size of the file."""

    seconds: float
    memory: int
    file: int


def endless(n_transitions: int) -> Iterator[Transition]:
    recording = load_recording("mspacman", min(_STEPS, n_transitions // N_ENVS), N_ENVS)
    return islice(chain.from_iterable(map(transitions, repeat(recording))), n_transitions // N_ENVS)


def filled(cls: type[ReplayBuffer], n_transitions: int, **kwargs: Any) -> ReplayBuffer:
    recording = load_recording("mspacman", 1, N_ENVS)
    spaces = recording.observation_space, recording.action_space
    buffer = cls(n_transitions, *spaces, device="cpu", n_envs=N_ENVS, **kwargs)
    for transition in endless(n_transitions):
        buffer.add(*transition)
    return buffer


def measured(action: Callable[[], object], path: Path) -> Measured:
    before = settled_rss()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from now
    began = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - began
    held = rss() - before if result is not None else 0
    return Measured(seconds, peak_rss() - before - held, path.stat().st_size)


def saving(way: str, n_transitions: int, path: Path) -> list[Measured]:
    """Measure saving and, for ``save()``, saving again after a hundredth of the buffer was overwritten."""
    buffer = filled(ReplayBuffer if way == "SB3, pickle" else CompressedReplayBuffer, n_transitions)
    if not isinstance(buffer, CompressedReplayBuffer) or way == "pickle":
        return [measured(lambda: save_to_pkl(path, buffer), path)]
    first = measured(lambda: buffer.save(path), path)
    for transition in islice(endless(n_transitions), n_transitions // N_ENVS // 100):
        buffer.add(*transition)
    return [first, measured(lambda: buffer.save(path), path)]


def loading(way: str, path: Path) -> Measured:
    load = CompressedReplayBuffer.load if way == "save()" else load_from_pkl
    pickle.loads(pickle.dumps(np.zeros(1)))
    return measured(lambda: load(path), path)


def compare(n_transitions: int, ways: list[str], folder: Path) -> dict[tuple[str, str], Measured]:
    print(f"\n{n_transitions:,} MsPacman transitions\n")
    print(f"{'':<28}{'seconds':>10}{'more memory':>14}{'file':>12}")
    found = {}
    for way in ways:
        path = folder / way.replace(", ", "_").replace("()", "")
        path = path.with_suffix(".pkl") if "pickle" in way else path
        first, *again = run_in_fresh_process(saving, way, n_transitions, path)
        found[way, "save"] = first
        found[way, "load"] = run_in_fresh_process(loading, way, path)
        rows = {"save": first, **dict(zip(["save again"], again, strict=False)), "load": found[way, "load"]}
        for action, row in rows.items():
            print(f"{way + ', ' + action:<28}{row.seconds:>10.2f}{row.memory / 1e6:>11.0f} MB{row.file / 1e6:>9.1f} MB")
        path.unlink()
    return found


def on_disk(n_transitions: int, folder: Path) -> tuple[int, int, int, float]:
    """Fill a buffer on disk one and a half times. Return memory before and at its peak, bytes of data, and seconds."""
    before = most = anonymous_memory()
    recording = load_recording("mspacman", 1, N_ENVS)
    buffer = CompressedReplayBuffer(
        n_transitions, recording.observation_space, recording.action_space, "cpu", N_ENVS, storage="mmap", path=folder
    )
    began = time.perf_counter()
    for step, transition in enumerate(endless(n_transitions * 3 // 2)):
        buffer.add(*transition)
        if step % 1000 == 0:
            buffer.sample(256)
            most = max(most, anonymous_memory())
    seconds = time.perf_counter() - began
    data = buffer.memory_usage().total
    buffer.close()
    return before, most, data, seconds


def anonymous_memory() -> int:
    """Resident memory of this process that no file backs, so the system cannot drop it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transitions", type=int, default=200_000)
    parser.add_argument(
        "--sb3-transitions", type=int, help="for SB3's buffer (default: a quarter, because each takes 56 kB)"
    )
    parser.add_argument("--disk", type=int, metavar="TRANSITIONS", help="instead, a buffer on disk of this size")
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        if arguments.disk:
            before, most, data, seconds = run_in_fresh_process(on_disk, arguments.disk, folder / "buffer")
            print(f"{arguments.disk:,} transitions on disk, filled one and a half times in {seconds:.0f} s")
            print(f"data {data / 1e6:.0f} MB, RssAnon at most {most / 1e6:.0f} MB, {before / 1e6:.0f} MB before")
            print(f"RssAnon is {100 * most / data:.0f}% of the data's size")
            return
        compare(arguments.transitions, ["save()", "pickle"], folder)
        found = compare(arguments.sb3_transitions or arguments.transitions // 4, ["SB3, pickle", "save()"], folder)
        for action in ("save", "load"):
            times = found["SB3, pickle", action].seconds / found["save()", action].seconds
            print(f"\n{action}: {times:.0f} times faster than SB3's pickle", end="")
        ratio = found["SB3, pickle", "save"].file / found["save()", "save"].file
        print(f"\nfile: {ratio:.0f} times smaller")


if __name__ == "__main__":
    main()
