"""PPO with environments that run on the GPU: SB3's loop, which copies to the host, and one that stays on the device.

    python -m benchmarks.studies.gpu_device_loop --json results.json

Models take turns, and get the same random numbers. In the end, their weights must be bit-identical.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before anything uses CUDA
sys.path.append(str(Path(__file__).parents[2] / "examples"))  # for device_breakout

import numpy as np
import torch as th
from stable_baselines3 import PPO

from device_breakout import STACK, DeviceBreakout
from sb3_extra_buffers.gpu_buffers import GpuRolloutBuffer
from sb3_extra_buffers.measure.training import hash_of
from sb3_extra_buffers.training_utils.device_env import DeviceVecEnv
from sb3_extra_buffers.training_utils.device_loop import on_device

DECLARED = {"frame_stack": STACK}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SB3": (PPO, {}),
    "SB3's loop, GPU buffer": (PPO, {"rollout_buffer_class": GpuRolloutBuffer, "rollout_buffer_kwargs": DECLARED}),
    "on device": (on_device(PPO), {"rollout_buffer_kwargs": DECLARED}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--n-envs", type=int, default=256)
    parser.add_argument("--n-steps", type=int, default=64, help="steps per rollout (default: %(default)s)")
    parser.add_argument("--epochs", type=int, nargs="*", default=[1, 4], help="epochs of PPO (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="timed turns of each model (default: %(default)s)")
    parser.add_argument(
        "--no-cuda-graph", action="store_true", help="launch every kernel of an environment step on its own"
    )
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    th.backends.cudnn.deterministic, th.backends.cudnn.benchmark = True, False
    results = {"environment alone": {"steps/s": environment_alone(arguments)}}
    print(results)
    for n_epochs in arguments.epochs:
        name = f"PPO, {arguments.n_envs} environments, {n_epochs} epochs"
        results[name] = found = measure(arguments, n_epochs)
        print(name, *(f"{key} {value:,.2f}" for key, value in found.items()), sep="\n  ", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def make_env(arguments: argparse.Namespace) -> DeviceBreakout:
    return DeviceBreakout(arguments.n_envs, arguments.device, cuda_graph=not arguments.no_cuda_graph)


def environment_alone(arguments: argparse.Namespace, n: int = 200) -> float:
    env = make_env(arguments)
    actions = th.zeros(arguments.n_envs, dtype=th.int64, device=env.device)
    rate = 0.0
    for _ in range(2):  # the first time, kernels are loaded
        began = time.perf_counter()
        for _ in range(n):
            env.step(actions)
        wait(arguments.device)
        rate = n * arguments.n_envs / (time.perf_counter() - began)
    return rate


def measure(arguments: argparse.Namespace, n_epochs: int) -> dict[str, float]:
    """Steps per second with each loop, in total and while collecting, and whether the weights are identical."""
    models = {}
    for name, (algorithm, options) in MODELS.items():
        env = DeviceVecEnv(make_env(arguments))
        sizes = {"n_steps": arguments.n_steps, "batch_size": 1024, "n_epochs": n_epochs}
        models[name] = algorithm("CnnPolicy", env, seed=0, device=arguments.device, **sizes, **options)
        collect_timed(models[name], arguments.device)
    n_steps = arguments.n_envs * arguments.n_steps
    rates: dict[str, list[float]] = {name: [] for name in models}
    collecting: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(arguments.turns + 1):  # the first one compiles
        for name, model in models.items():
            np.random.seed(turn)
            th.manual_seed(turn)
            began = time.perf_counter()
            model.learn(n_steps, reset_num_timesteps=False)
            wait(arguments.device)
            rates[name].append(n_steps / (time.perf_counter() - began))
            collecting[name].append(n_steps / model.seconds_collecting)
    found = {f"{name}, steps/s": statistics.median(own[1:]) for name, own in rates.items()}
    found |= {f"{name}, steps/s while collecting": statistics.median(own[1:]) for name, own in collecting.items()}
    found["on device / SB3"] = found["on device, steps/s"] / found["SB3, steps/s"]
    found["same weights"] = float(len({hash_of(model.policy) for model in models.values()}) == 1)
    return found


def collect_timed(model: Any, device: str) -> None:
    """Let a model record how long it collects."""
    collect = model.collect_rollouts

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        found = collect(*args, **kwargs)
        wait(device)
        model.seconds_collecting = time.perf_counter() - began
        return found

    model.collect_rollouts = timed


def wait(device: str) -> None:
    if device.startswith("cuda"):
        th.cuda.synchronize()


if __name__ == "__main__":
    main()
