"""Shared code of the examples: command-line arguments, training, evaluation, watching an agent, and tables."""

from __future__ import annotations

import argparse
import csv
import os
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback
from stable_baselines3.common.vec_env import VecEnv
from tqdm import tqdm

from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.compressed.base import DummyCls
from sb3_extra_buffers.recording import RecordBuffer
from sb3_extra_buffers.training_utils.atari import make_env
from sb3_extra_buffers.training_utils.callbacks import BufferStatsCallback
from sb3_extra_buffers.training_utils.eval_model import eval_model

WITHOUT_BUFFERS = {"replay_buffer_class": DummyCls, "rollout_buffer_class": DummyCls}
"""``custom_objects`` for loading a model that only plays, so that its buffer takes no memory."""


def arguments(description: str | None, steps: int | None = None, n_envs: int = 8) -> argparse.ArgumentParser:
    """A parser with the options of all examples."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    if steps is not None:
        parser.add_argument("--steps", type=int, default=steps, help="environment steps, over all environments")
    parser.add_argument("--n-envs", type=int, default=n_envs, help="number of parallel environments")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--device", default="auto", help="device of the network: auto, cpu, cuda, ...")
    parser.add_argument("--folder", type=Path, default=Path("models"), help="folder of the saved models")
    return parser


def training_arguments(description: str | None, steps: int, n_envs: int = 8) -> argparse.ArgumentParser:
    parser = arguments(description, steps, n_envs)
    parser.add_argument("--compression", default="auto", help="auto, none, delta, zstd-dict, zstd-3, rle-jit, ...")
    parser.add_argument("--framestack", type=int, default=4, help="frames per observation")
    parser.add_argument("--eval-every", type=int, default=100_000, help="steps between evaluations; 0: never")
    parser.add_argument("--log", type=Path, help="folder for TensorBoard logs")
    parser.add_argument("--curve", type=Path, metavar="CSV", help="write the learning curve to this file")
    return parser


# Training


def rollout_size(options: argparse.Namespace, n_steps: int, batch_size: int) -> dict[str, Any]:
    """``n_steps`` and ``batch_size`` for PPO. A run that is shorter than one rollout gets smaller rollouts."""
    n_steps = max(2, min(n_steps, options.steps // options.n_envs))
    return {"n_steps": n_steps, "batch_size": min(batch_size, n_steps * options.n_envs)}


def train(model: BaseAlgorithm, name: str, options: argparse.Namespace, eval_env: VecEnv | None = None) -> None:
    """Train with a progress bar, save the model, and print speed, returns and the buffer's memory."""
    callbacks: list[BaseCallback] = [Progress(options.steps), BufferStatsCallback()]
    if options.curve is not None:
        callbacks.append(Curve(options.curve))
    if eval_env is not None and options.eval_every > 0:
        callbacks.append(
            EvalCallback(
                eval_env,
                n_eval_episodes=5,
                eval_freq=max(options.eval_every // options.n_envs, 1),
                best_model_save_path=str(options.folder / f"{name}_best"),
                verbose=0,
            )
        )
    began = time.perf_counter()
    model.learn(options.steps, callback=CallbackList(callbacks))
    seconds = time.perf_counter() - began
    options.folder.mkdir(parents=True, exist_ok=True)
    model.save(options.folder / name)

    buffer: Any = getattr(model, "replay_buffer", None) or getattr(model, "rollout_buffer", None)
    print(f"\n{model.num_timesteps:,} steps in {seconds:.0f} s, {model.num_timesteps / seconds:.0f} steps per second")
    if model.ep_info_buffer:
        returns = [episode["r"] for episode in model.ep_info_buffer]
        print(f"last {len(returns)} episodes: mean return {np.mean(returns):.2f}")
    if hasattr(buffer, "memory_usage"):
        print(buffer.memory_usage())
    print(f"saved as {options.folder / name}.zip")


class Progress(BaseCallback):
    """A progress bar with steps, steps per second, and the mean return of recent episodes."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.bar = tqdm(total=steps, unit="step")

    def _on_step(self) -> bool:
        self.bar.update(self.model.n_envs)
        return True

    def _on_rollout_end(self) -> None:
        if self.model.ep_info_buffer:
            mean = np.mean([episode["r"] for episode in self.model.ep_info_buffer])
            self.bar.set_postfix(mean_return=f"{mean:.1f}", refresh=False)

    def _on_training_end(self) -> None:
        self.bar.close()


class Curve(BaseCallback):
    """Writes the command and ``points`` rows with the mean return of the last 100 episodes to a CSV file."""

    def __init__(self, path: Path, points: int = 200) -> None:
        super().__init__()
        self.path = path
        self.points = points

    def _on_training_start(self) -> None:
        self.began = time.perf_counter()
        self.every = max(self.model._total_timesteps // self.points, 1)
        self.next = self.every
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("w", newline="")
        print(f"# python {shlex.join(sys.argv)}", file=self.file)
        self.writer = csv.writer(self.file)
        self.writer.writerow(["steps", "seconds", "episodes", "mean_return"])

    def _on_step(self) -> bool:
        if self.num_timesteps >= self.next:
            self.next += self.every
            returns = [episode["r"] for episode in self.model.ep_info_buffer or ()]
            mean = f"{np.mean(returns):.3f}" if returns else ""
            seconds = round(time.perf_counter() - self.began, 1)
            self.writer.writerow([self.num_timesteps, seconds, len(returns), mean])
            self.file.flush()
        return True

    def _on_training_end(self) -> None:
        self.file.close()


# Evaluation


def load(algorithm: type[BaseAlgorithm], name: str, options: argparse.Namespace) -> BaseAlgorithm:
    """Load the best model, or the last one with ``--last`` or if there is no best, without its buffer."""
    candidates = [options.folder / f"{name}_best" / "best_model.zip", options.folder / f"{name}.zip"]
    for path in candidates[1:] if options.last else candidates:
        if path.exists():
            print(f"loaded {path}")
            return algorithm.load(path, device=options.device, custom_objects=WITHOUT_BUFFERS)
    raise SystemExit(f"There is no model {candidates[-1]} yet: train one with the example_train_*.py of the same name.")


def evaluation_arguments(description: str | None, n_envs: int = 8) -> argparse.ArgumentParser:
    parser = arguments(description, n_envs=n_envs)
    parser.add_argument("--episodes", type=int, default=20, help="number of games to play")
    parser.add_argument("--last", action="store_true", help="use the last model instead of the best one")
    parser.add_argument("--framestack", type=int, default=4, help="frames per observation, as in training")
    parser.add_argument("--steps", type=int, help="end each game after this many steps")
    return parser


def evaluate(algorithm: type[BaseAlgorithm], name: str, game: str, options: argparse.Namespace) -> None:
    model = load(algorithm, name, options)
    print(eval_model(options.episodes, game_env(game, options), model))


def game_env(game: str, options: argparse.Namespace, **kwargs: Any) -> VecEnv:
    if options.steps is not None:
        kwargs["max_num_frames_per_episode"] = 4 * options.steps
    return make_env(game, options.n_envs, framestack=options.framestack, seed=options.seed, env_kwargs=kwargs)


def watching_arguments(description: str | None) -> argparse.ArgumentParser:
    parser = evaluation_arguments(description, n_envs=1)
    parser.set_defaults(episodes=1)
    parser.add_argument("--video", type=Path, help="write a video to this file instead of opening a window")
    return parser


def watch(algorithm: type[BaseAlgorithm], name: str, game: str, options: argparse.Namespace) -> None:
    """Show the game in a window. Without a screen, write a video instead."""
    model = load(algorithm, name, options)
    video = options.video or (None if has_screen() else Path(f"{name}.mp4"))
    env = game_env(game, options, render_mode="human" if video is None else "rgb_array")
    record = None
    if video is not None:
        require("imageio_ffmpeg", "a video", "video")  # fail before the game, not after it
        record = RecordBuffer(res=(210, 160))
    print(eval_model(options.episodes, env, model, buffer=record))
    if record is not None:
        record.save_video(video, fps=15)  # type: ignore[arg-type]  # there is a path if there is a record
        print(f"{len(record):,} frames written to {video}. In memory they took {record.nbytes / 1e6:.1f} MB, "
              f"uncompressed {len(record) * record.frames[0].nbytes / 1e6:.1f} MB")  # fmt: skip


def has_screen() -> bool:
    return sys.platform in ("win32", "darwin") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


# Measuring


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, numbers right-aligned."""
    lines = [list(headings), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]

    def aligned(line: Sequence[str]) -> str:
        first, *others = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        return f"| {' | '.join([first.strip().ljust(widths[0]), *others])} |"

    ruler = [("-" * (width + 1) + ":") if i else "-" * (width + 2) for i, width in enumerate(widths)]
    return "\n".join([aligned(lines[0]), f"|{'|'.join(ruler)}|", *map(aligned, lines[1:])])


def observation_bytes(buffer: Any) -> int:
    """Bytes of a buffer's observations; for compressed buffers, with everything that decoding needs."""
    if hasattr(buffer, "memory_usage"):
        usage = buffer.memory_usage()
        return int(usage.total - usage.fields)
    return sum(getattr(buffer, name).nbytes for name in ("observations", "next_observations") if hasattr(buffer, name))
