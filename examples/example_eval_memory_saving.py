"""Compare memory and write time of a replay buffer under every compression method, on the same game.

The game is played once. Then each method fills a buffer with the same transitions, in a fresh process. "Observations"
is the size of the observations in the buffer, "Memory" the growth of the process's resident memory, and "Latency" the
total time spent in add.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

import common
from sb3_extra_buffers.codecs.registry import available_methods, parse_method
from sb3_extra_buffers.measure.buffers import SB3, Task
from sb3_extra_buffers.measure.comparison import warm_up
from sb3_extra_buffers.measure.memory import settled_rss
from sb3_extra_buffers.measure.policies import load_policy
from sb3_extra_buffers.measure.processes import run_in_fresh_process
from sb3_extra_buffers.measure.transitions import TransitionFile, collect
from sb3_extra_buffers.storage.usage import readable
from sb3_extra_buffers.training_utils.atari import make_env

METHODS = (
    *("auto", "none", "rle", "rle-jit", "delta", "bitpack", "pixel-lz", "delta-zstd", "zstd-dict/3", "zstd-dict/9"),
    *("gzip1", "gzip3", "igzip0", "igzip1", "igzip3"),
    *("zstd-100", "zstd-50", "zstd-20", "zstd-5", "zstd-3", "zstd-1"),
    *("zstd1", "zstd3", "zstd5", "zstd10", "zstd15", "zstd22"),
    *("lz4-frame/1", "lz4-frame/5", "lz4-frame/9", "lz4-frame/12"),
    *("lz4-block/1", "lz4-block/5", "lz4-block/9", "lz4-block/16"),
)


def main(argv: Sequence[str] | None = None) -> None:
    print(compare("Replay", memory_arguments(__doc__).parse_args(argv)))


def memory_arguments(description: str | None) -> Any:
    parser = common.arguments(description, steps=40_000, n_envs=4)
    parser.add_argument("--methods", help="comma-separated; default: all that are installed")
    parser.add_argument("--game", default="MsPacmanNoFrameskip-v4", help="the Atari game to play")
    parser.add_argument("--model", default="dqn_mspacman", help="model that plays, from example_train_replay.py")
    parser.add_argument("--framestack", type=int, default=4, help="frames per observation")
    return parser


def compare(kind: Literal["Replay", "Rollout"], options: Any) -> str:
    """Measure every method and return a Markdown table."""
    with tempfile.TemporaryDirectory() as folder:
        data = play(options, Path(folder) / "transitions")
        task = Task(kind, data.observation_space, data.action_space, data.n_envs)
        methods = tqdm([SB3, *chosen(options.methods)], unit="method")
        rows = [(method, run_in_fresh_process(measure, method, task, data)) for method in methods]
    sb3_size, sb3_memory, _ = rows[0][1]
    return common.table(
        ["Compression", "Observations", "%", "Memory", "Memory %", "Latency (s)"],
        [
            [
                "SB3 (baseline)" if method == SB3 else method,
                readable(size),
                f"{100 * size / sb3_size:.1f}%",
                readable(memory),
                f"{100 * memory / sb3_memory:.1f}%" if sb3_memory else "-",
                f"{seconds:.2f}",
            ]
            for method, (size, memory, seconds) in rows
        ],
    )


def chosen(methods: str | None) -> list[str]:
    if methods is not None:
        return methods.split(",")
    installed = ("auto", *available_methods())
    return [method for method in METHODS if parse_method(method).name in installed]


def play(options: Any, path: Path) -> TransitionFile:
    """Play a game and write its transitions to a file, which every process reads."""
    env = make_env(options.game, options.n_envs, framestack=options.framestack, seed=options.seed)
    model = options.folder / f"{options.model}.zip"
    if not model.exists():
        print(f"There is no {model}: playing random actions.")
    policy = load_policy(model, env) if model.exists() else None
    steps = max(1, options.steps // options.n_envs)
    collected = tqdm(collect(env, steps, options.seed, policy), "playing", total=steps, unit="step")
    data = TransitionFile.write(path, env, collected)
    env.close()
    return data


def measure(method: str, task: Task, data: TransitionFile) -> tuple[int, int, float]:
    """Bytes of the observations, growth of resident memory, and seconds in add (rollouts: to read all data once)."""
    warm_up(method, task, data)
    before = settled_rss()
    buffer = task.make(method, data.transition_count)
    seconds = 0.0
    for transition in data.read():
        began = time.perf_counter()
        task.add(buffer, transition)
        seconds += time.perf_counter() - began
    grown = settled_rss() - before
    size = common.observation_bytes(buffer)
    if task.kind == "Rollout":
        began = time.perf_counter()
        for _ in buffer.get(64):
            pass
        seconds = time.perf_counter() - began
    return size, grown, seconds


if __name__ == "__main__":
    main()
