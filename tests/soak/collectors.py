"""Kill collectors of a learner at random, on a cluster of three nodes, and check that nothing else is lost.

python -m tests.soak.collectors [--kills 50] [--seed 0]
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
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

    class Kill(BaseCallback):
        """Kills a collector or, less often, a node with whatever runs there."""

        kills = nodes_killed = 0
        next_at = 60

        def _on_step(self) -> bool:
            intake: Any = self.model._intake  # type: ignore[attr-defined]
            # A collector that has not come back yet is left alone: it would be given up.
            alive = [number for number, failures in enumerate(intake._failures) if failures < 2]
            if self.n_calls >= self.next_at and alive:
                self.kills += 1
                self.next_at = self.n_calls + int(rng.integers(20, 120))
                if rng.random() < 0.1:
                    self.nodes_killed += 1
                    cluster.remove_node(nodes.pop(0), allow_graceful=False)
                    nodes.append(cluster.add_node(num_cpus=1))
                else:
                    ray.kill(intake.transport._actors[int(rng.choice(alive))])
            return self.kills < given.kills

    model = distributed(DQN)(
        "MlpPolicy", "CartPole-v1", device="cpu", seed=given.seed, learning_starts=100, buffer_size=200_000,
        batch_size=8, policy_kwargs={"net_arch": [8]},
        collectors={"n": 2, "envs": 2, "segment_steps": 8, "actor_options": {"num_cpus": 1}},
    )  # fmt: skip
    kill, began, seen = Kill(), time.monotonic(), {}
    start = model._start_intake

    def watched() -> Any:
        seen["intake"] = start()
        return seen["intake"]

    model._start_intake = watched
    model.learn(10_000_000, callback=kill)
    statistics = seen["intake"].statistics
    print(
        f"{kill.kills} kills ({kill.nodes_killed} of nodes), {statistics.n_deaths} restarts, {statistics.n_lost} "
        f"segments lost, {statistics.n_segments} arrived, {time.monotonic() - began:.0f} s"
    )
    model.replay_buffer.check()
    assert statistics.n_lost <= statistics.n_deaths
    for part in model.replay_buffer.parts:
        later, now = part.observations[1 : part.size()], part.next_observations[: part.size() - 1]
        continued = (np.asarray(later) == np.asarray(now)).all(axis=-1)
        assert (continued | ((part.dones + part.timeouts)[: part.size() - 1] > 0)).all(), "a gap without a boundary"
    ray.shutdown()
    cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
