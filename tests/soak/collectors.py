"""Kill collectors and shards of a learner at random, on a cluster of three nodes, and check what was lost.

    python -m tests.soak.collectors [--kills 50] [--seed 0] [--shards 2]

An observation says which environment it is of, and how many steps that has made. The environment also writes the number
of its steps to a file. So the buffer tells whether a step is missing, and the files, how many steps died with a
collector: at most those of the segment that it was collecting.

With shards, their processes are killed, too. Then batches must hold steps as they were made, whatever is lost.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

SEGMENT_STEPS, N_ENVS = 8, 2
EPISODE_STEPS = 30


class CountingEnv(gym.Env[Any, Any]):
    """Observations are the number of the environment, which no other one has, and the number of its steps."""

    observation_space = gym.spaces.Box(0, 1e9, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, folder: Path) -> None:
        for number in itertools.count():
            try:
                self._file = os.open(folder / str(number), os.O_CREAT | os.O_EXCL | os.O_RDWR)
            except FileExistsError:
                continue
            break
        self.number, self.steps = number, 0

    def observation(self) -> Any:
        return np.array([self.number, self.steps], np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps += 1  # so that a new episode does not look like a step of the old one
        return self.observation(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        os.pwrite(self._file, b"%d" % self.steps, 0)
        return self.observation(), 0.0, False, self.steps % EPISODE_STEPS == 0, {}


def check_losses(parts: list[Any], folder: Path, running: set[int], ahead: int) -> int:
    """Compare the buffer with the files.

    :param running: Environments whose collector was not killed, and may be some segments ahead.
    :return: How many steps were lost.
    """
    received: dict[int, int] = {}
    for part in parts:
        if (size := part.size()) == 0:
            continue  # its collector had no CPU in time
        now, later = np.asarray(part.observations)[:size], np.asarray(part.next_observations)[:size]
        ended = np.asarray(part.dones + part.timeouts)[:size] > 0
        assert (now[..., 0] == later[..., 0]).all()
        assert (now[..., 1] + 1 == later[..., 1]).all()
        for lane in range(part.n_envs):
            following, before = now[1:, lane], later[:-1, lane]
            is_other = following[:, 0] != before[:, 0]
            steps_between = following[:, 1] - before[:, 1]
            assert ended[:-1, lane][is_other].all(), "a gap without a boundary"
            assert (steps_between[~is_other] == ended[:-1, lane][~is_other]).all(), "a step is missing"
            order = [int(number) for number in now[np.flatnonzero([True, *is_other]), lane, 0]]
            assert len(set(order)) == len(order), f"steps of a dead collector arrived late: environments {order}"
            for number in np.unique(now[:, lane, 0]):
                assert number not in received
                received[int(number)] = int(later[now[:, lane, 0] == number, lane, 1].max())
    lost = 0
    for path in folder.iterdir():
        number, text = int(path.name), path.read_bytes()
        missing = (int(text) if text else 0) - received.get(number, 0)
        n_resets = 1 + missing // EPISODE_STEPS
        allowed = SEGMENT_STEPS * (ahead + 1 if number in running else 1) + n_resets
        assert 0 <= missing <= allowed, f"{missing} steps of environment {number} are missing"
        lost += 0 if number in running else missing
    return lost


def kinds_to_kill(n: int, with_shards: bool, rng: np.random.Generator) -> list[str]:
    """What is killed, in a random order: every tenth a node, at least three, and as many shards as collectors."""
    n_nodes = max(n // 10, 3)
    others = ["collector", "shard"] if with_shards else ["collector"]
    kinds = ["node"] * n_nodes + [others[number % len(others)] for number in range(n - n_nodes)]
    return [kinds[number] for number in rng.permutation(n)]


def check_batch(batch: Any) -> None:
    """Every transition of a batch is a step of one environment."""
    now, later = batch.observations.numpy(), batch.next_observations.numpy()
    assert (now[:, 0] == later[:, 0]).all()
    assert (now[:, 1] + 1 == later[:, 1]).all()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=0, help="how many; 0: all parts are at the learner")
    given = parser.parse_args()

    import ray
    import torch as th
    from ray.cluster_utils import Cluster
    from stable_baselines3 import DQN
    from stable_baselines3.common.callbacks import BaseCallback

    from sb3_extra_buffers.distributed import distributed

    th.set_num_threads(1)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    rng = np.random.default_rng(given.seed)
    kinds = kinds_to_kill(given.kills, given.shards > 0, rng)

    class Kill(BaseCallback):
        """Kills a collector, a shard, or a node with whatever runs there."""

        killed: ClassVar[list[str]] = []
        next_at = 60

        def _on_step(self) -> bool:
            intake: Any = self.model._intake  # type: ignore[attr-defined]
            # A collector that has not come back yet is left alone: it would be given up.
            alive = [number for number, failures in enumerate(intake._failures) if failures < 2]
            if self.n_calls >= self.next_at and len(self.killed) < given.kills and alive:
                kind = kinds[len(self.killed)]
                self.killed.append(kind)
                self.next_at = self.n_calls + int(rng.integers(20, 120))
                if kind == "node":
                    cluster.remove_node(nodes.pop(0), allow_graceful=False)
                    nodes.append(cluster.add_node(num_cpus=1))
                elif kind == "shard":
                    buffer: Any = self.model.replay_buffer  # type: ignore[attr-defined]
                    ray.kill(buffer._shards._transport._actors[int(rng.integers(given.shards))])
                else:
                    ray.kill(intake.transport._actors[int(rng.choice(alive))])
            if self.n_calls > 200 and self.n_calls % 10 == 0:
                check_batch(self.model.replay_buffer.sample(64))  # type: ignore[attr-defined]
            # Go on for a while after the last kill, so that the learner has seen it.
            return len(self.killed) < given.kills or self.n_calls < self.next_at

    folder = Path(tempfile.mkdtemp())
    make_env = partial(CountingEnv, folder)
    collectors = {
        "n": 2, "envs": N_ENVS, "segment_steps": SEGMENT_STEPS, "ahead": 2, "make_env": make_env,
        "actor_options": {"num_cpus": 1},
    }  # fmt: skip
    in_shards = {"placement": "shards", "shards": given.shards, "path": tempfile.mkdtemp()} if given.shards else {}
    with tempfile.TemporaryDirectory() as elsewhere:
        env = CountingEnv(Path(elsewhere))  # only asked for its spaces
        model = distributed(DQN)(
            "MlpPolicy", env, device="cpu", seed=given.seed, learning_starts=100, buffer_size=200_000,
            batch_size=8, learning_rate=0.0, policy_kwargs={"net_arch": [8]}, collectors=collectors,
            replay_buffer_kwargs=in_shards,
        )  # fmt: skip
    kill, began = Kill(), time.monotonic()
    model.learn(10_000_000, callback=kill)
    statistics = model.collector_statistics
    print(
        f"killed: {', '.join(f'{n} {kind}s' for kind, n in sorted(Counter(kill.killed).items()))}, in "
        f"{time.monotonic() - began:.0f} s, {statistics.n_deaths} restarts, {statistics.n_lost} segments lost, "
        f"{statistics.n_segments} arrived"
    )
    model.replay_buffer.check()
    if given.shards:
        for _ in range(20):
            check_batch(model.replay_buffer.sample(256))
        print(model.replay_buffer.shard_statistics)
        ray.shutdown()
        cluster.shutdown()
        return 0
    parts = model.replay_buffer.parts
    running = {
        int(number) for part in parts if part.pos for number in np.asarray(part.observations)[part.pos - 1, :, 0]
    }
    lost = check_losses(parts, folder, running, collectors["ahead"])
    print(f"{lost} of {sum(part.size() * N_ENVS for part in parts) + lost} steps were lost")
    ray.shutdown()
    cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
