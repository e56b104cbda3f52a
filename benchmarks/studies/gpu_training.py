"""Training on a GPU end to end: DQN and PPO with SB3's buffers, with compressed ones in host memory and on the GPU.

    python -m benchmarks.studies.gpu_training --json results.json

The environments replay frames of MsPacman, which takes almost no time. Models take turns, so that all of them see the
same machine load, and get the same random numbers: in the end, their weights must be bit-identical. DQN is also trained
without a buffer, on the same batch again and again: no buffer can make it faster than that.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before anything uses CUDA

import numpy as np
import torch as th
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from benchmarks.playback import play_back
from benchmarks.recordings import Recording, Transition, load_recording
from sb3_extra_buffers.compressed import CompressedReplayBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer, GpuRolloutBuffer
from sb3_extra_buffers.measure.training import hash_of

FRAMES = 600
"""Steps that the environments replay in a loop."""
BUFFER_SIZE, LEARNING_STARTS = 40_000, 10


class Case(NamedTuple):
    name: str
    algorithm: Any
    n_envs: int
    steps: int
    """Steps of each environment in one turn."""
    options: dict[str, Any]


CASES = (
    Case("DQN, batch 32", DQN, 4, 60, {"batch_size": 32}),
    Case("DQN, batch 256", DQN, 4, 40, {"batch_size": 256}),
    Case("DQN, batch 256, 4 gradient steps", DQN, 4, 20, {"batch_size": 256, "gradient_steps": 4}),
    Case("PPO, 64 environments", PPO, 64, 128, {"n_steps": 128, "batch_size": 1024, "n_epochs": 4}),
)


class SameBatch(ReplayBuffer):
    """Takes almost no time: it stores only the first steps, and every batch is the first one."""

    batch: Any = None

    def add(self, *step: Any) -> None:
        if self.pos < LEARNING_STARTS:
            super().add(*step)

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        if self.batch is None:
            self.batch = super().sample(batch_size, env)
        return self.batch


CLASSES: dict[Any, dict[str, Any]] = {
    DQN: {"SB3": None, "compressed": CompressedReplayBuffer, "GPU": GpuReplayBuffer, "no buffer": SameBatch},
    PPO: {"SB3": None, "compressed": CompressedRolloutBuffer, "GPU": GpuRolloutBuffer},
}


class Replayed(VecEnv):
    """Plays recorded transitions, whatever the actions are."""

    def __init__(self, recording: Recording, seen: Sequence[Transition]) -> None:
        # Every model draws random actions from its own copy of the space.
        super().__init__(len(seen[0].done), recording.observation_space, copy.deepcopy(recording.action_space))
        self._seen = seen
        self._at = 0

    def reset(self) -> Any:
        return self._seen[self._at].obs

    def step_async(self, actions: Any) -> None:
        pass

    def step_wait(self) -> Any:
        now = self._seen[self._at]
        self._at = (self._at + 1) % len(self._seen)
        return self._seen[self._at].obs, now.reward, now.done, [dict(info) for info in now.infos]

    def close(self) -> None:
        pass

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [None] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        pass

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return []

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--turns", type=int, default=12, help="timed turns of each model (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    # Enough for equal weights. torch.use_deterministic_algorithms() slows down kernels that are deterministic anyway.
    th.backends.cudnn.deterministic, th.backends.cudnn.benchmark = True, False
    recording = load_recording("mspacman", 8_192)
    results = {}
    for case in CASES:
        results[case.name] = found = measure(case, recording, arguments.device, arguments.turns)
        print(f"{case.name:34s}", *(f"{name} {value:,.2f}" for name, value in found.items()), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def measure(case: Case, recording: Recording, device: str, turns: int) -> dict[str, float]:
    """Steps per second with each buffer, and whether all weights are identical."""
    seen = list(islice(play_back(recording, FRAMES, case.n_envs), FRAMES))
    models = {name: make(case, Replayed(recording, seen), cls, device) for name, cls in CLASSES[case.algorithm].items()}
    rates: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(turns + 2):  # the first two compile kernels and fill buffers
        names = list(models)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            model = models[name]
            np.random.seed(turn)
            th.manual_seed(turn)
            began = time.perf_counter()
            model.learn(case.steps * case.n_envs, reset_num_timesteps=False)
            th.cuda.synchronize()
            rates[name].append(case.steps * case.n_envs / (time.perf_counter() - began))
    found = {f"{name}, steps/s": statistics.median(own[2:]) for name, own in rates.items()}
    # The ratio of each turn, because the speed of the machine changes.
    for name in list(models)[1:]:
        found[f"{name} / SB3"] = statistics.median(np.divide(rates[name], rates["SB3"])[2:].tolist())
    trained = {hash_of(model.policy) for name, model in models.items() if name != "no buffer"}
    found["same weights"] = float(len(trained) == 1)
    return found


def make(case: Case, env: VecEnv, cls: Any, device: str) -> Any:
    options = dict(case.options)
    if case.algorithm is DQN:
        options |= {"buffer_size": BUFFER_SIZE, "learning_starts": LEARNING_STARTS * case.n_envs, "train_freq": 1}
    if cls is not None:
        options["replay_buffer_class" if case.algorithm is DQN else "rollout_buffer_class"] = cls
    return case.algorithm("CnnPolicy", env, seed=0, device=device, **options)


if __name__ == "__main__":
    main()
