"""The real SBX: the same networks, bit for bit, as with SB3's buffers, and batches that JAX does not copy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="make test-sbx installs SBX into an environment of its own")
sbx = pytest.importorskip("sbx", reason="make test-sbx installs SBX into an environment of its own")

from gymnasium import spaces  # noqa: E402
from stable_baselines3 import HerReplayBuffer  # noqa: E402
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer, RolloutBuffer  # noqa: E402
from stable_baselines3.common.envs import BitFlippingEnv, FakeImageEnv  # noqa: E402

from sb3_extra_buffers.compressed import (  # noqa: E402
    CompressedHerReplayBuffer,
    CompressedNStepReplayBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
)

PAGE = Path(__file__).parents[2] / "docs/sbx.md"
pytestmark = pytest.mark.filterwarnings("default")  # of JAX and its relatives


def networks(model: Any) -> list[Any]:
    """All parameters of a model, target networks and the states of optimizers included."""
    states = [value for value in vars(model.policy).values() if hasattr(value, "opt_state")]
    assert states
    return jax.tree_util.tree_leaves(jax.device_get(states))


def assert_same_networks(ours: Any, theirs: Any, untrained: Any) -> None:
    parameters, expected, initial = networks(ours), networks(theirs), networks(untrained)
    assert len(parameters) == len(expected) > 0
    assert all(np.array_equal(first, second) for first, second in zip(parameters, expected, strict=True))
    assert not all(np.array_equal(first, second) for first, second in zip(parameters, initial, strict=True))


def image_env() -> gymnasium.Env[Any, Any]:
    env = FakeImageEnv(screen_height=40, screen_width=40, n_channels=3, discrete=True)
    env.observation_space.seed(0)  # observations are drawn from it
    return gymnasium.wrappers.TimeLimit(env, 30)


OFF_POLICY = {"learning_starts": 60, "buffer_size": 150, "batch_size": 32, "gradient_steps": 2, "train_freq": 2}


@pytest.mark.parametrize("algorithm", ["SAC", "TD3", "DDPG", "TQC", "CrossQ"])
def test_continuous_actions(algorithm: str) -> None:
    def trained(buffer_class: type[ReplayBuffer], steps: int = 200) -> Any:
        options = {**OFF_POLICY, "policy_kwargs": {"net_arch": [16, 16]}, "replay_buffer_class": buffer_class}
        return getattr(sbx, algorithm)("MlpPolicy", "Pendulum-v1", seed=3, **options).learn(steps)

    ours = trained(CompressedReplayBuffer)
    assert_same_networks(ours, trained(ReplayBuffer), trained(ReplayBuffer, 1))
    assert isinstance(ours.replay_buffer, CompressedReplayBuffer)


def test_dqn_on_images() -> None:
    """Batches are large enough to be in memory that is used again, and JAX computes while the next one is sampled."""

    def trained(buffer_class: type[ReplayBuffer], steps: int = 200) -> Any:
        options = {**OFF_POLICY, "batch_size": 64, "replay_buffer_class": buffer_class}
        return sbx.DQN("CnnPolicy", image_env(), seed=3, **options).learn(steps)

    assert_same_networks(trained(CompressedReplayBuffer), trained(ReplayBuffer), trained(ReplayBuffer, 1))


def test_dqn_with_n_step_returns() -> None:
    def trained(buffer_class: type[ReplayBuffer], steps: int = 200) -> Any:
        kwargs = {"n_steps": 3, "gamma": 0.99}
        options = {**OFF_POLICY, "replay_buffer_class": buffer_class, "replay_buffer_kwargs": kwargs}
        return sbx.DQN("MlpPolicy", "CartPole-v1", seed=3, **options).learn(steps)

    assert_same_networks(
        trained(CompressedNStepReplayBuffer), trained(NStepReplayBuffer), trained(NStepReplayBuffer, 1)
    )


def test_hindsight_experience_replay() -> None:
    def trained(buffer_class: type[HerReplayBuffer], steps: int = 200) -> Any:
        options = {**OFF_POLICY, "policy_kwargs": {"net_arch": [16, 16]}, "replay_buffer_class": buffer_class}
        return sbx.SAC("MultiInputPolicy", BitFlippingEnv(4, continuous=True), seed=3, **options).learn(steps)

    assert_same_networks(trained(CompressedHerReplayBuffer), trained(HerReplayBuffer), trained(HerReplayBuffer, 1))


@pytest.mark.parametrize(("policy", "env"), [("MlpPolicy", "CartPole-v1"), ("CnnPolicy", image_env)])
def test_ppo(policy: str, env: Any) -> None:
    def trained(buffer_class: type[RolloutBuffer], steps: int = 256) -> Any:
        options = {"n_steps": 128, "batch_size": 64, "n_epochs": 2, "rollout_buffer_class": buffer_class}
        return sbx.PPO(policy, env() if callable(env) else env, seed=3, **options).learn(steps)

    ours, theirs = trained(CompressedRolloutBuffer), trained(RolloutBuffer)
    assert isinstance(ours.rollout_buffer, CompressedRolloutBuffer)
    assert_same_networks(ours, theirs, sbx.PPO(policy, env() if callable(env) else env, seed=3))


def filled_buffer() -> CompressedReplayBuffer:
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    buffer = CompressedReplayBuffer(100, space, spaces.Discrete(2), device="cpu")
    for step in range(100):
        frames = np.full((1, 4, 84, 84), step, dtype=np.uint8)
        buffer.add(frames, frames + 1, np.zeros(1), np.zeros(1), np.zeros(1), [{}])
    return buffer


def test_jax_uses_the_memory_of_a_batch_without_a_copy() -> None:
    buffer = filled_buffer()
    for _ in range(10):
        batch = buffer.sample(128)
        for tensor in (batch.observations, batch.next_observations):
            array = tensor.numpy()
            assert jax.device_put(array).unsafe_buffer_pointer() == array.ctypes.data == tensor.data_ptr()


def test_a_batch_stays_as_it_is_while_jax_computes() -> None:
    """JAX computes in the background. The memory must not be used for another batch before it has finished."""

    @jax.jit
    def slow_sums(images: Any) -> Any:
        wait = jax.lax.fori_loop(0, 2_000_000, lambda _, value: value * 0.5 + 1, 0.0)  # about 10 ms
        return images.astype(np.int32).sum(axis=(1, 2, 3)) + (wait * 0).astype(np.int32)

    buffer, results, expected = filled_buffer(), [], []
    for _ in range(20):
        images = buffer.sample(64).observations.numpy()
        expected.append(images.sum(axis=(1, 2, 3), dtype=np.int32))
        results.append(slow_sums(images))
        del images
    for result, sums in zip(results, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(result), sums)


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    subprocess.run([sys.executable, "page.py"], cwd=tmp_path, check=True, timeout=300)
