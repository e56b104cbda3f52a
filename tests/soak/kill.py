"""Kills processes at random moments of saving, flushing, checkpointing and adding, and looks at what they leave.

    python -m tests.soak.kill --kills 200 --seed 0

A worker goes on from what the last one left, adds transitions, and makes them last: by ``flush()`` of a buffer on disk,
by ``save()``, or by a checkpoint. It keeps a log of what it has done. After it was killed, what it left must load,
be at least as new as the last thing that was done, and hold exactly the transitions that it should.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3 import DQN
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_extra_buffers.compressed import CompressedDictReplayBuffer, CompressedReplayBuffer
from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from sb3_extra_buffers.persistence import folder as folder_module
from sb3_extra_buffers.training_utils.checkpoints import CheckpointBufferCallback
from tests.environments import SpaceEnv
from tests.persistence.buffers import ACTIONS, DICT, IMAGES, steps_for
from tests.transitions import Transition

SLOTS, N_ENVS = 150, 2
_KNOWN_STEPS = 499
_TOO_LONG = 60


class Target(NamedTuple):
    """What is killed."""

    way: str
    method: str = "auto"
    is_dict: bool = False

    @property
    def label(self) -> str:
        return f"{self.way}-{self.method}{'-dict' if self.is_dict else ''}".replace("/", "_")


TARGETS = [
    Target("flush", "none"),
    Target("save", "delta"),
    Target("checkpoint"),
    Target("flush", "delta"),
    Target("save", "zstd-dict/3"),
    Target("checkpoint on disk", "rle"),
    Target("flush", "zstd-dict/3"),
    Target("save", is_dict=True),
    Target("flush", is_dict=True),
]


class KillError(AssertionError):
    """What a killed process left is not what it should be."""


# The transitions, numbered from 0 on. Their numbers are their rewards.


def transition(steps: list[Transition], number: int) -> Transition:
    return steps[number % len(steps)]._replace(reward=np.full(N_ENVS, number, dtype=np.float32))


def count(buffer: Any) -> int:
    """How many transitions were ever added."""
    return int(buffer.rewards[: buffer.size()].max()) + 1 if buffer.size() else 0


def check(buffer: Any, steps: list[Transition]) -> None:
    """Everything in a buffer against what was added to it."""
    n, slots = count(buffer), buffer.buffer_size
    if (buffer.pos, buffer.full) != (n % slots, n >= slots):
        raise KillError(f"{n} transitions, but position {buffer.pos}, full: {buffer.full}")
    for number in range(max(0, n - slots), n):
        slot, expected = number % slots, transition(steps, number)
        found = {
            "obs": _at(buffer.observations, slot),
            "next_obs": _at(buffer.next_observations, slot),
            "action": buffer.actions[slot].reshape(-1),
            "reward": buffer.rewards[slot],
            "done": buffer.dones[slot],
        }
        for name, value in found.items():
            wanted = getattr(expected, name)
            for key in wanted if isinstance(wanted, dict) else [None]:
                one, other = (value, wanted) if key is None else (value[key], wanted[key])
                if not np.array_equal(one, np.asarray(other).reshape(one.shape)):
                    raise KillError(f"{name} of transition {number} of {n} in slot {slot} is wrong")


def _at(observations: Any, slot: int) -> Any:
    is_dict = isinstance(observations, dict)
    return {key: part[slot] for key, part in observations.items()} if is_dict else observations[slot]


# The workers. They never end by themselves.


def new_buffer(target: Target, **more: Any) -> Any:
    cls, space = (CompressedDictReplayBuffer, DICT) if target.is_dict else (CompressedReplayBuffer, IMAGES)
    return cls(
        SLOTS * N_ENVS, space, ACTIONS, "cpu", n_envs=N_ENVS, compression_method=target.method, **more
    )  # fmt: skip


def new_model(target: Target, path: Path) -> DQN:
    more = {"storage": "mmap", "path": path / "on disk"} if "disk" in target.way else {}
    return DQN(
        "MlpPolicy",
        DummyVecEnv([lambda: SpaceEnv(IMAGES, ACTIONS)] * N_ENVS),
        buffer_size=SLOTS * N_ENVS,
        replay_buffer_class=CompressedReplayBuffer,
        replay_buffer_kwargs={"compression_method": target.method, **more},
        policy_kwargs={"net_arch": [4]},
        device="cpu",
    )


def opened(target: Target, path: Path, chosen: random.Random) -> tuple[Any, Callable[[], object]]:
    """What was left at ``path``, or something new, and what makes it last."""
    if target.way == "flush":
        buffer = new_buffer(target, storage="mmap", path=path / "folder")
        return buffer, buffer.flush
    if target.way == "save":
        file = path / "file"
        mmap = chosen.random() < 0.5
        buffer = BaseCompressedBuffer.load(file, "cpu", mmap=mmap) if file.exists() else new_buffer(target)
        return buffer, lambda: buffer.save(file)
    model = CheckpointBufferCallback.resume(DQN, path / "checkpoints", device="cpu") or new_model(target, path)
    callback = CheckpointBufferCallback(10**9, path / "checkpoints")
    callback.init_callback(model)
    buffer = model.replay_buffer

    def save() -> None:
        model.num_timesteps = callback.num_timesteps = count(buffer)
        callback.save()

    return buffer, save


def work(target: Target, path: Path, seed: int, log: int) -> None:
    chosen = random.Random(seed)
    buffer, make_last = opened(target, path, chosen)
    steps = known_steps(buffer)
    number = count(buffer)
    while True:
        for _ in range(chosen.choice([1, 3, 20, 200])):
            os.write(log, f"add {number}\n".encode())
            buffer.add(*transition(steps, number))
            number += 1
        if target.way == "flush" and chosen.random() < 0.2:
            continue
        make_last()
        os.write(log, f"done {number}\n".encode())


def known_steps(buffer: Any) -> list[Transition]:
    key = str(buffer.observation_space)
    if key not in _steps:
        _steps[key] = steps_for(buffer, _KNOWN_STEPS)
    return _steps[key]


_steps: dict[str, list[Transition]] = {}


# After the kill


def left(target: Target, path: Path) -> Any:
    """What a killed worker left, or ``None``."""
    if target.way == "flush":
        return new_buffer(target, storage="mmap", path=path / "folder")
    if target.way == "save":
        return BaseCompressedBuffer.load(path / "file", "cpu") if (path / "file").exists() else None
    model = CheckpointBufferCallback.resume(DQN, path / "checkpoints", device="cpu")
    if model is None:
        return None
    if model.num_timesteps != count(model.replay_buffer):
        raise KillError(f"A model after {model.num_timesteps} steps with a buffer after {count(model.replay_buffer)}")
    return model.replay_buffer


def check_left(target: Target, path: Path, lines: list[str]) -> int:
    done = max((int(line.split()[1]) for line in lines if line.startswith("done")), default=0)
    begun = max((int(line.split()[1]) + 1 for line in lines if line.startswith("add")), default=0)
    buffer = left(target, path)
    n = 0
    if buffer is not None:
        buffer._check_folder()
        check(buffer, known_steps(buffer))
        n = count(buffer)
        buffer.close()
    # It may be newer than what was done: the process was killed before it could say so.
    if not done <= n <= max(begun, done):
        raise KillError(f"{n} transitions, although {done} were done and {begun} begun")
    return n


@dataclass
class Summary:
    kills: int = 0
    during: dict[str, int] = field(default_factory=dict)
    transitions: int = 0

    def __str__(self) -> str:
        during = ", ".join(f"{number} × {way}" for way, number in sorted(self.during.items()))
        return f"{self.kills} kills ({during}), {self.transitions:,} transitions left and compared"


def kill_once(target: Target, path: Path, chosen: random.Random) -> tuple[int, int]:
    """Returns how many transitions the worker began to add in its life, and how many are left of all."""
    path.mkdir(parents=True, exist_ok=True)
    log_path = path / "log"
    log = os.open(log_path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    seed, before = chosen.getrandbits(32), log_path.stat().st_size
    worker = os.fork()
    if worker == 0:
        try:
            work(target, path, seed, log)
        except BaseException:
            os.write(log, traceback.format_exc().encode())
        finally:
            os._exit(1)
    # Some are killed while they open what the one before has left.
    waits = chosen.random() < 0.8
    while waits and log_path.stat().st_size == before:
        time.sleep(0.001)
        if os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break
    time.sleep(chosen.choice([0.01, 0.05, 0.2]) * chosen.random())
    os.kill(worker, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    os.close(log)
    text = log_path.read_text()
    text = text[: text.rfind("\n") + 1]  # the system may stop in the middle of a line: then nothing came after it
    os.truncate(log_path, len(text.encode()))
    if status != -signal.SIGKILL:
        raise KillError(f"The worker ended by itself:\n{text[before:]}")
    # A worker that was killed without a word adds what the one before it did.
    begun = text[before:].count("add ")
    return begun, check_left(target, path, text.splitlines())


def warm_up(target: Target) -> None:
    """Have everything imported and compiled, once for all workers."""
    buffer = new_buffer(target)
    for number, step in enumerate(known_steps(buffer)[: SLOTS + 50]):
        buffer.add(*step._replace(reward=np.full(N_ENVS, number)))
    buffer.sample(10)


def run(kills: int, seed: int, path: Path, report: Callable[[str], object] = str) -> Summary:
    chosen, summary = random.Random(seed), Summary()
    th.set_num_threads(1)
    folder_module._WORTH_A_FLUSH = 1 << 16  # so that buffers on disk also flush by themselves
    for target in TARGETS:
        warm_up(target)
    for number in range(kills):
        target = TARGETS[number % len(TARGETS)]
        try:
            begun, n = kill_once(target, path / target.label, chosen)
        except BaseException as error:
            raise KillError(f"Kill {number}, {target.label}, seed {seed}, left in {path}: {error}") from error
        way = target.way if begun else f"{target.way}, opening"
        summary.kills += 1
        summary.during[way] = summary.during.get(way, 0) + 1
        summary.transitions += n
        report(f"{number + 1} of {kills}: {target.label} after {begun} added, {n} left, all exact")
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    arguments = parser.parse_args()
    path = Path(tempfile.mkdtemp(prefix="killed-"))
    sys.stdout.write(f"seed {arguments.seed}\n")

    def report(line: str) -> None:
        faulthandler.dump_traceback_later(_TOO_LONG, exit=True)  # from now on, instead of from the last time on
        sys.stdout.write(f"\r\x1b[K{line}" if sys.stdout.isatty() else f"{line}\n")
        sys.stdout.flush()

    summary = run(arguments.kills, arguments.seed, path, report)
    faulthandler.cancel_dump_traceback_later()
    shutil.rmtree(path)
    sys.stdout.write(f"\n{summary}\n")


if __name__ == "__main__":
    main()
