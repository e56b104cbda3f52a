"""A real cluster of Ray on this machine: three nodes, and collectors that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback

from sb3_extra_buffers.distributed import ShardedReplayBuffer, channel, distributed
from sb3_extra_buffers.errors import WorkerError
from tests.distributed.test_sharded_buffer import filled
from tests.transitions import assert_same

ray = pytest.importorskip("ray")
from sb3_extra_buffers.distributed import ray_transport  # noqa: E402  # which needs Ray

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore"),  # those of Ray itself, which depend on the load of the machine
]
NETWORK = {"net_arch": [8]}
SIZES = (40, 60, 30)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=1)
    ray.init(address=made.address, log_to_driver=False, logging_level="error")
    yield made
    ray.shutdown()
    made.shutdown()


def make(**collectors: Any) -> Any:
    options = {"n": 2, "envs": 2, "segment_steps": 8, "actor_options": {"num_cpus": 1}, **collectors}
    return distributed(DQN)(
        "MlpPolicy", "CartPole-v1", device="cpu", seed=0, learning_starts=50, buffer_size=4000, batch_size=8,
        policy_kwargs=dict(NETWORK), collectors=options,
    )  # fmt: skip


class KillNowAndThen(BaseCallback):
    """Kills the process of a collector."""

    def __init__(self, at: tuple[int, ...]) -> None:
        super().__init__()
        self.at = at

    def _on_step(self) -> bool:
        if self.n_calls in self.at:
            transport = self.model._intake.transport  # type: ignore[union-attr]
            ray.kill(transport._actors[self.n_calls % 2])
        return True


def test_collectors_on_a_cluster_are_replaced_when_they_die(cluster: Any) -> None:
    model = make()
    model.learn(800, callback=KillNowAndThen(at=(60, 61, 200)))
    assert model.num_timesteps == 800
    model.replay_buffer.check()
    for part in model.replay_buffer.parts:
        size = max(part.size(), 1)  # a collector that was always killed in time has sent nothing
        later, now = part.observations[1:size], part.next_observations[: size - 1]
        continued = (np.asarray(later) == np.asarray(now)).all(axis=-1)
        assert (continued | ((part.dones + part.timeouts)[: size - 1] > 0)).all()


def test_rollouts_on_a_cluster_are_those_of_sb3(cluster: Any) -> None:
    """With one collector. It dies in later iterations: with two, whatever is missing is collected again."""
    given = {"seed": 1, "n_steps": 32, "batch_size": 16, "n_epochs": 2, "device": "cpu", "policy_kwargs": dict(NETWORK)}
    expected = PPO("MlpPolicy", "CartPole-v1", **given).learn(128)
    ours = distributed(PPO)("MlpPolicy", "CartPole-v1", collectors={"n": 1}, **given).learn(128)
    for left, right in zip(expected.policy.parameters(), ours.policy.parameters(), strict=True):
        assert (left == right).all()
    model = distributed(PPO)("MlpPolicy", "CartPole-v1", collectors={"n": 2}, **given)
    model.learn(512, callback=KillNowAndThen(at=(20, 33, 70)))
    assert model.num_timesteps == 512
    assert model.rollout_buffer.full
    assert model.collector_statistics.n_deaths == 3


def test_shards_on_a_cluster_are_replaced_when_they_die(cluster: Any) -> None:
    kwargs: dict[str, Any] = {"placement": "shards", "shards": 2}
    model = distributed(DQN)(
        "MlpPolicy", "CartPole-v1", device="cpu", seed=0, learning_starts=50, buffer_size=4000, batch_size=8,
        policy_kwargs=dict(NETWORK), replay_buffer_class=ShardedReplayBuffer, replay_buffer_kwargs=kwargs,
        collectors={"n": 2, "envs": 2, "segment_steps": 8, "actor_options": {"num_cpus": 0.5}},
    )  # fmt: skip

    class KillShards(BaseCallback):
        def _on_step(self) -> bool:
            if self.n_calls in (60, 200):
                buffer: Any = self.model.replay_buffer  # type: ignore[attr-defined]
                ray.kill(buffer._shards._transport._actors[self.n_calls % 2])
            return True

    model.learn(800, callback=KillShards())
    assert model.num_timesteps == 800
    assert model.replay_buffer.shard_statistics["transitions_lost"] > 0
    model.replay_buffer.check()
    assert model.replay_buffer.sample(32).rewards.shape == (32, 1)
    assert model.replay_buffer._shards._writes_to_learner  # all nodes are on this machine
    model.replay_buffer.close()


@pytest.mark.parametrize("is_near", [True, False], ids=["channel", "calls of Ray"])
def test_the_way_to_a_shard(cluster: Any, is_near: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A shard that cannot connect, as on another machine, is called by Ray. Batches are the same."""
    if not is_near:
        monkeypatch.setattr(ray_transport.Listener, "__init__", make_unreachable)
    here, there = filled(SIZES), filled(SIZES, placement="shards", shards=2, prefetch=3)
    transport = there._shards._transport
    assert all((link._channel is not None) == is_near for link in transport._links)
    there.save(tmp_path / "saved")
    for turn in range(8):
        np.random.seed(turn)
        expected = tuple(here.sample(32))
        there._shards._queue.clear()
        np.random.seed(turn)
        if turn == 4:  # and is replaced by one that is restored from the save
            pid = ray.get(transport._actors[0].__ray_call__.remote(lambda actor: os.getpid()))
            os.kill(pid, signal.SIGKILL)
            there.sample(32)
            continue
        assert_same(expected, tuple(there.sample(32)))
    assert there._shards._restarts == [1, 0]
    with pytest.raises(WorkerError, match="has no attribute 'dance'"):
        there._shards.ask_all("dance")
    there.close()
    there.close()


def make_unreachable(listener: Any) -> None:
    listener.address, listener.close = channel.Address("/nowhere", b"", b""), lambda: None


def test_an_error_of_the_environment_reaches_the_learner(cluster: Any) -> None:
    class Broken(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            raise ZeroDivisionError("the environment is broken")

    with pytest.raises(WorkerError, match="the environment is broken"):
        make(make_env=lambda: Broken(gym.make("CartPole-v1"))).learn(100)


def test_a_segment_that_arrived_before_a_death_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray may report the failure of the second call first."""
    from ray.exceptions import RayActorError

    class Ray:
        @staticmethod
        def wait(calls: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
            ready = [call for call in ("second", "first") if call in calls][:num_returns]
            return ready, [call for call in calls if call not in ready]

        @staticmethod
        def get(call: str) -> Any:
            if call == "second":
                raise RayActorError
            return np.zeros(3, np.uint8)

    monkeypatch.setattr(ray_transport, "ray", Ray)
    transport = ray_transport.RayTransport(None, None)
    transport._waiting = {"first": 0, "second": 0}
    assert [reply.segment is None for reply in transport.replies(1.0)] == [False, True]


def test_an_address_where_nobody_answers() -> None:
    """In a process of its own, which is in no cluster."""
    program = (
        "from stable_baselines3 import DQN\n"
        "from sb3_extra_buffers.distributed import distributed\n"
        "distributed(DQN)('MlpPolicy', 'CartPole-v1', collectors={}, ray={'address': '127.0.0.1:1'}).learn(10)\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert "ConfigurationError: Cannot start Ray or connect to it at address '127.0.0.1:1'" in done.stderr
    assert time.monotonic() - began < 60


def test_ray_is_only_imported_when_it_is_used() -> None:
    program = (
        "import sys\n"
        "from stable_baselines3 import DQN\n"
        "from sb3_extra_buffers.distributed import distributed\n"
        "model = distributed(DQN)('MlpPolicy', 'CartPole-v1', collectors={'n': 1})\n"
        "assert 'ray' not in sys.modules\n"
        "sys.modules['ray'] = None\n"
        "model.learn(10)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert 'pip install "sb3-extra-buffers[ray]"' in done.stderr
