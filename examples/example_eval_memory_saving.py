"""Store the same game in a replay buffer with every compression method, and compare memory and time.

A game is played once. Then every method gets a process of its own, which fills a buffer with exactly those transitions.
"Observations" adds up what they take in the buffer, "memory" is by how much the process grew, as the operating system
counts it. Latency is the time spent in add.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer
from tqdm import tqdm

import common
from sb3_extra_buffers.codecs.registry import available_methods, parse_method
from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.measure.memory import settled_rss
from sb3_extra_buffers.measure.policies import RandomPolicy
from sb3_extra_buffers.measure.processes import run_in_fresh_process
from sb3_extra_buffers.storage.usage import readable
from sb3_extra_buffers.training_utils.atari import make_env
from sb3_extra_buffers.training_utils.buffer_warmup import warm_up

BASELINE = "SB3 (baseline)"
METHODS = (
    *("auto", "none", "rle", "rle-jit", "delta", "zstd-dict/3", "zstd-dict/9"),
    *("gzip1", "gzip3", "igzip0", "igzip1", "igzip3"),
    *("zstd-100", "zstd-50", "zstd-20", "zstd-5", "zstd-3", "zstd-1"),
    *("zstd1", "zstd3", "zstd5", "zstd10", "zstd15", "zstd22"),
    *("lz4-frame/1", "lz4-frame/5", "lz4-frame/9", "lz4-frame/12"),
    *("lz4-block/1", "lz4-block/5", "lz4-block/9", "lz4-block/16"),
)


def main(argv: Sequence[str] | None = None) -> None:
    options = memory_arguments(__doc__).parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        recording = play(options, Path(folder))
        rows = [
            (method, run_in_fresh_process(store, recording, method))
            for method in tqdm([BASELINE, *chosen(options.methods)], unit="method")
        ]
    print(summary(rows))


def memory_arguments(description: str | None) -> Any:
    parser = common.arguments(description, steps=40_000, n_envs=4)
    parser.add_argument("--methods", help="comma-separated; by default all that are installed")
    parser.add_argument("--game", default="MsPacmanNoFrameskip-v4")
    parser.add_argument("--model", default="dqn_mspacman", help="who plays: a model of example_train_replay.py")
    parser.add_argument("--framestack", type=int, default=4)
    return parser


def chosen(methods: str | None) -> list[str]:
    if methods is not None:
        return methods.split(",")
    installed = ("auto", *available_methods())
    return [method for method in METHODS if parse_method(method).name in installed]


def play(options: Any, folder: Path) -> Path:
    """Play a game into a compressed buffer, which is small enough to hand to every process as a file."""
    env = make_env(options.game, options.n_envs, framestack=options.framestack, seed=options.seed)
    path = options.folder / f"{options.model}.zip"
    if path.exists():
        player: Any = DQN.load(path, device=options.device, custom_objects=common.WITHOUT_BUFFERS)
    else:
        print(f"There is no {path}: playing at random.")
        player = RandomPolicy(env.action_space, env.num_envs, options.seed)
    recording = CompressedReplayBuffer(options.steps, env.observation_space, env.action_space, n_envs=options.n_envs)
    print(warm_up(recording, options.n_envs, env, player))
    env.close()
    (folder / "recording").write_bytes(pickle.dumps(recording))
    return folder / "recording"


def store(path: Path, method: str) -> tuple[int, int, float]:
    """Fill a buffer. Returns what observations take, by how much this process grew, and seconds in ``add``."""
    recording = pickle.loads(path.read_bytes())
    fill(build(recording, method), recording, steps=min(50, recording.size()))  # loads and compiles what it needs
    before = settled_rss()
    buffer = build(recording, method)
    seconds = fill(buffer, recording, recording.size())
    grown = settled_rss() - before
    return common.observation_bytes(buffer), grown, seconds


def build(recording: ReplayBuffer, method: str) -> Any:
    size, spaces = recording.buffer_size * recording.n_envs, (recording.observation_space, recording.action_space)
    if method == BASELINE:
        return ReplayBuffer(size, *spaces, n_envs=recording.n_envs)
    return CompressedReplayBuffer(size, *spaces, n_envs=recording.n_envs, compression_method=method)


def fill(buffer: Any, recording: ReplayBuffer, steps: int) -> float:
    seconds = 0.0
    for step in range(steps):
        transition = (
            recording.observations[step],
            recording.next_observations[step],
            recording.actions[step],
            recording.rewards[step],
            recording.dones[step],
            [{"TimeLimit.truncated": bool(timeout)} for timeout in recording.timeouts[step]],
        )
        began = time.perf_counter()
        buffer.add(*transition)
        seconds += time.perf_counter() - began
    return seconds


def summary(rows: list[tuple[str, tuple[int, int, float]]]) -> str:
    raw_size, raw_memory, _ = rows[0][1]
    return common.table(
        ["Compression", "Observations", "%", "Memory", "Memory %", "Latency (s)"],
        [
            [
                method,
                readable(size),
                f"{100 * size / raw_size:.1f}%",
                readable(memory),
                f"{100 * memory / raw_memory:.1f}%" if raw_memory else "-",
                f"{seconds:.2f}",
            ]
            for method, (size, memory, seconds) in rows
        ],
    )


if __name__ == "__main__":
    main()
