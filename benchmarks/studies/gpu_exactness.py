"""Are buffers on a GPU exact over long histories? Training and sampling next to SB3's buffers, on Atari games.

    python -m benchmarks.studies.gpu_exactness --minutes 4 --seed 0

First, DQN and PPO are trained twice with SB3's buffers, to show that training on the device is reproducible, and once
with ours. Then pairs of buffers, SB3's and ours, get the same transitions and rollouts until the time is up, and all
that is read from them is compared. To repeat a failure, run it again with the same ``--seed``.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before anything uses CUDA

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.buffers import DictReplayBuffer, DictRolloutBuffer, ReplayBuffer, RolloutBuffer
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_extra_buffers.gpu_buffers import (
    GpuDictReplayBuffer,
    GpuDictRolloutBuffer,
    GpuReplayBuffer,
    GpuRolloutBuffer,
)
from sb3_extra_buffers.training_utils.atari import make_env

GAMES = ("MsPacmanNoFrameskip-v4", "EnduroNoFrameskip-v4", "SeaquestNoFrameskip-v4")
METHODS = ("delta", "rle", "zstd", "none", "auto")
N_ENVS = 4
SCENE_STEPS = 150
"""The most steps of one game in a row. Then another game follows, so that reference frames must be renewed."""
IMAGE = spaces.Box(0, 255, (4, 84, 84), np.uint8)
DICT = spaces.Dict({"image": IMAGE, "numbers": spaces.Box(-np.inf, np.inf, (5,), np.float32)})
ACTIONS = spaces.Discrete(9)
_USES_OURS = (False, False, True)
"""Whether each of the three runs uses our buffers."""


class Case(NamedTuple):
    kind: str
    method: str
    source: str

    def __str__(self) -> str:
        return f"{self.kind:15s} {self.method:6s} from {self.source}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=4, help="time for comparing histories (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rollouts", type=int, default=60, help="rollouts of PPO; 0 skips training (default: %(default)s)"
    )
    parser.add_argument("--transitions", type=int, default=3_000, help="in DQN's buffer, which is filled three times")
    arguments = parser.parse_args()
    name = th.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(f"{name}, torch {th.__version__}, seed {arguments.seed}\n")
    good = compare_training(arguments) if arguments.rollouts else True
    good &= compare_histories(arguments)
    sys.exit(0 if good else 1)


def compare_training(arguments: argparse.Namespace) -> bool:
    all_same = True
    print(f"{'training':44s} {'SB3 again':>12s} {'ours':>12s}")
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as processes:
        runs = {
            (algorithm, game): [processes.submit(_weights, algorithm, game, arguments, ours) for ours in _USES_OURS]
            for algorithm, game in itertools.product((DQN, PPO), GAMES[:2])
        }
        for (algorithm, game), futures in runs.items():
            first, *others = [future.result() for future in futures]
            same = [all(map(np.array_equal, first, other)) for other in others]
            label = f"{algorithm.__name__} on {game}, {_length(algorithm, arguments)}"
            print(f"{label:44s} {_verdict(same[0]):>12s} {_verdict(same[1]):>12s}", flush=True)
            all_same &= same[1]
    return all_same


def _verdict(same: bool) -> str:
    return "identical" if same else "DIFFERENT"


def _length(algorithm: Any, arguments: argparse.Namespace) -> str:
    return f"{arguments.rollouts} rollouts" if algorithm is PPO else f"{4 * arguments.transitions:,} steps"


def _weights(algorithm: Any, game: str, arguments: argparse.Namespace, ours: bool) -> list[np.ndarray[Any, Any]]:
    th.set_num_threads(1)
    th.backends.cudnn.deterministic, th.backends.cudnn.benchmark = True, False
    th.use_deterministic_algorithms(mode=True)
    options: dict[str, Any]
    n_envs = 8 if algorithm is PPO else 4
    if algorithm is PPO:
        options = {"n_steps": 64, "batch_size": 128, "n_epochs": 2, "rollout_buffer_class": GpuRolloutBuffer}
        steps = arguments.rollouts * 64 * n_envs
    else:
        options = {"buffer_size": arguments.transitions, "learning_starts": 400, "target_update_interval": 400}
        options |= {"train_freq": 4, "replay_buffer_class": GpuReplayBuffer}
        steps = 4 * arguments.transitions
    if not ours:
        options = {name: value for name, value in options.items() if not name.endswith("_class")}
    env = make_env(game, n_envs, vec_env_cls=DummyVecEnv, seed=arguments.seed)
    model = algorithm("CnnPolicy", env, seed=arguments.seed, device=arguments.device, **options)
    model.learn(steps)
    env.close()
    return [tensor.numpy(force=True) for tensor in model.policy.state_dict().values()]


def compare_histories(arguments: argparse.Namespace) -> bool:
    recorded = [record(game, arguments.seed) for game in GAMES]
    sources = ("host", "device") if arguments.device == "cuda" else ("host",)
    kinds = ("replay", "rollout", "replay, Dict", "rollout, Dict")
    cases = [Case(*parts) for parts in itertools.product(kinds, METHODS, sources)]
    totals = {case: [0, 0, 0] for case in cases}
    end, good = time.monotonic() + 60 * arguments.minutes, True
    for number, case in enumerate(itertools.cycle(cases)):
        if time.monotonic() > end and number >= len(cases):
            break
        seed = arguments.seed * 1_000_003 + number
        play = play_rollouts if case.kind.startswith("rollout") else play_replay
        found = play(case, recorded, np.random.default_rng(seed), th.device(arguments.device))
        for i, value in enumerate(found):
            totals[case][i] += value
        if found[2]:
            print(f"DIFFERENT: {case}, history {number} of --seed {arguments.seed}", flush=True)
            good = False
    print(f"\n{'histories':40s} {'steps':>9s} {'batches':>9s} {'different':>10s}")
    for case, (steps, batches, wrong) in totals.items():
        print(f"{case!s:40s} {steps:9,} {batches:9,} {wrong:10,}")
    return good


def record(game: str, seed: int) -> list[tuple[Any, ...]]:
    """Play some hundred steps of a game, and return them as SB3 passes them to a replay buffer."""
    env = make_env(game, N_ENVS, vec_env_cls=DummyVecEnv, seed=seed)
    rng, steps, obs = np.random.default_rng(seed), [], env.reset()
    for _ in range(3 * SCENE_STEPS):
        action = rng.integers(env.action_space.n, size=N_ENVS)  # type: ignore[attr-defined]  # games have buttons
        following, reward, done, infos = env.step(action)
        last = np.array([info.get("terminal_observation", now) for now, info in zip(following, infos, strict=True)])
        steps.append((obs, last, action[:, None], reward, done, infos))
        obs = following
    env.close()
    return steps


def history(recorded: list[list[tuple[Any, ...]]], rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    """Yield scenes of all games endlessly. Some observations are all zeros, and some steps come twice."""
    while True:
        game = recorded[rng.integers(len(recorded))]
        begin = int(rng.integers(len(game) - SCENE_STEPS))
        for step in game[begin : begin + int(rng.integers(5, SCENE_STEPS))]:
            obs, following, *rest = step
            if rng.random() < 0.02:
                obs = np.zeros_like(obs)
            yield (obs, following, *rest)
            if rng.random() < 0.02:
                yield step


def play_replay(
    case: Case, recorded: list[list[tuple[Any, ...]]], rng: np.random.Generator, device: th.device
) -> tuple[int, int, int]:
    is_dict, slots = case.kind.endswith("Dict"), int(rng.integers(40, 250))
    plain_class, our_class = (DictReplayBuffer, GpuDictReplayBuffer) if is_dict else (ReplayBuffer, GpuReplayBuffer)
    space: Any = DICT if is_dict else IMAGE
    plain = plain_class(slots * N_ENVS, space, ACTIONS, device, N_ENVS)
    ours: Any = our_class(slots * N_ENVS, space, ACTIONS, device, N_ENVS, **_options(case))
    batches = wrong = 0
    n_steps = 4 * slots
    for step, transition in enumerate(itertools.islice(history(recorded, rng), n_steps)):
        plain.add(*_as_dicts(transition, is_dict))
        ours.add(*_on_device(_as_dicts(transition, is_dict), case, device))
        if rng.random() < 0.2 or step == n_steps - 1:
            size, seed = int(rng.choice([1, 32, 300])), int(rng.integers(1 << 31))
            wrong += not same(*(_seeded(seed, buffer.sample, size) for buffer in (plain, ours)))
            batches += 1
        if rng.random() < 0.002:
            ours = pickle.loads(pickle.dumps(ours))
        if rng.random() < 0.02:
            ours.check_device()
    return n_steps, batches, wrong


def play_rollouts(
    case: Case, recorded: list[list[tuple[Any, ...]]], rng: np.random.Generator, device: th.device
) -> tuple[int, int, int]:
    is_dict, slots = case.kind.endswith("Dict"), int(rng.integers(5, 70))
    plain_class, our_class = (DictRolloutBuffer, GpuDictRolloutBuffer) if is_dict else (RolloutBuffer, GpuRolloutBuffer)
    space: Any = DICT if is_dict else IMAGE
    plain = plain_class(slots, space, ACTIONS, device, n_envs=N_ENVS)
    ours: Any = our_class(slots, space, ACTIONS, device, n_envs=N_ENVS, **_options(case))
    steps, batches, wrong, n_rollouts = history(recorded, rng), 0, 0, 1000 // slots
    for _ in range(n_rollouts):
        for buffer in (plain, ours):
            buffer.reset()
        for transition in itertools.islice(steps, slots):
            value = th.tensor(rng.normal(size=N_ENVS).astype(np.float32), device=device)
            for buffer in (plain, ours):
                given = _as_dicts(transition, is_dict)
                given = given if buffer is plain else _on_device(given, case, device)
                buffer.add(given[0], given[2], given[3], given[4], value, value - 1)
        for buffer in (plain, ours):
            buffer.compute_returns_and_advantage(value, np.zeros(N_ENVS))
        for batch_size in (None, int(rng.integers(1, 64))):
            seed = int(rng.integers(1 << 31))
            rollouts = [_seeded(seed, _batches, (buffer, batch_size)) for buffer in (plain, ours)]
            for expected, found in zip(*rollouts, strict=True):
                wrong += not same(expected, found)
                batches += 1
        if rng.random() < 0.1:
            ours.check_device()
    return n_rollouts * slots, batches, wrong


def same(expected: Any, found: Any) -> bool:
    """Whether nested dicts and tuples of tensors are equal, bit for bit."""
    if isinstance(expected, dict):
        return all(same(part, found[key]) for key, part in expected.items())
    if isinstance(expected, tuple):
        return all(map(same, expected, found))
    return expected is found or (expected.dtype == found.dtype and th.equal(expected, found))


def _seeded(seed: int, function: Any, argument: Any) -> Any:
    np.random.seed(seed)
    return function(argument)


def _batches(of: tuple[Any, int | None]) -> list[Any]:
    buffer, batch_size = of
    return list(buffer.get(batch_size))


def _options(case: Case) -> dict[str, Any]:
    options: dict[str, Any] = {} if case.method == "auto" else {"compression_method": case.method}
    return options | ({"frame_stack": 4} if case.source == "device" and not case.kind.endswith("Dict") else {})


def _as_dicts(transition: tuple[Any, ...], is_dict: bool) -> tuple[Any, ...]:
    obs, following, *rest = transition
    if is_dict:
        obs, following = ({"image": part, "numbers": _numbers(part)} for part in (obs, following))
    return (obs, following, *rest)


def _numbers(images: Any) -> Any:
    return images.reshape(len(images), -1)[:, 5000:5005].astype(np.float32) / 3


def _on_device(transition: tuple[Any, ...], case: Case, device: th.device) -> tuple[Any, ...]:
    if case.source == "host":
        return transition

    def sent(part: Any) -> Any:
        return (
            {key: sent(value) for key, value in part.items()} if isinstance(part, dict) else th.tensor(part).to(device)
        )

    obs, following, action, reward, done, infos = transition
    return (*map(sent, (obs, following, action, reward, done)), infos)


if __name__ == "__main__":
    main()
