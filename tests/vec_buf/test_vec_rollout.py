"""Several rollout buffers behind one."""

from __future__ import annotations

import functools
import itertools
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env

from sb3_extra_buffers.compressed import CompressedDictRolloutBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.vec_buf import DummyVecRolloutBuffer
from tests.environments import SpaceEnv
from tests.transitions import add_to_rollout, assert_same, play

STEPS, N_ENVS = 12, 3
IMAGES = spaces.Box(0, 255, (4, 8, 9), np.uint8)
MIXED = spaces.Dict({"image": IMAGES, "number": spaces.Discrete(5)})
ACTIONS = spaces.Discrete(5)


def made(buffers: Any, use_threads: bool = False, space: spaces.Space = IMAGES) -> DummyVecRolloutBuffer:
    return DummyVecRolloutBuffer(
        STEPS, space, ACTIONS, "cpu", n_envs=N_ENVS, use_threads=use_threads, buffers=buffers, gamma=0.9, gae_lambda=0.8
    )


def alone(space: spaces.Space = IMAGES, buffer_class: Any = RolloutBuffer) -> Any:
    return buffer_class(STEPS, space, ACTIONS, "cpu", n_envs=N_ENVS, gamma=0.9, gae_lambda=0.8)


def fill(buffers: list[Any], space: spaces.Space = IMAGES) -> None:
    for buffer in buffers:
        buffer.reset()
    for transition in itertools.islice(play(space, N_ENVS), STEPS):
        add_to_rollout(buffers, transition)
    for buffer in buffers:
        buffer.compute_returns_and_advantage(th.ones(N_ENVS), np.zeros(N_ENVS))


@pytest.mark.parametrize("use_threads", [False, True])
@pytest.mark.parametrize("space", [IMAGES, MIXED], ids=["images", "dict"])
def test_all_buffers_hold_and_return_what_one_alone_would(space: spaces.Space, use_threads: bool) -> None:
    classes = (
        (DictRolloutBuffer, CompressedDictRolloutBuffer) if space is MIXED else (RolloutBuffer, CompressedRolloutBuffer)
    )
    together, reference = made(classes, use_threads, space), alone(space, classes[0])
    for _ in range(2):
        fill([together, reference], space)
        assert (together.pos, together.full, together.size()) == (reference.pos, True, STEPS)
        np.testing.assert_array_equal(together.returns, reference.returns)
        np.random.seed(0)
        expected = list(reference.get(10))
        after = np.random.get_state()[1]
        np.random.seed(0)
        assert_same(tuple(together.get(10)), tuple(expected))
        np.testing.assert_array_equal(np.random.get_state()[1], after)
        for buffer in together.buffers:
            assert buffer.gamma == 0.9
            np.testing.assert_array_equal(buffer.returns, reference.returns)
        np.testing.assert_array_equal(together.values, reference.values)


@pytest.mark.parametrize("use_threads", [False, True])
def test_ppo_trains_as_with_the_first_buffer(use_threads: bool) -> None:
    def weights(**kwargs: Any) -> th.Tensor:
        env = make_vec_env(lambda: SpaceEnv(IMAGES), n_envs=2, seed=0)
        model = PPO("MlpPolicy", env, n_steps=16, batch_size=8, n_epochs=2, seed=0, device="cpu", **kwargs)
        model.learn(64)
        return model.policy.state_dict()["action_net.weight"]

    buffers = [RolloutBuffer, functools.partial(CompressedRolloutBuffer, compression_method="rle")]
    together = weights(
        rollout_buffer_class=DummyVecRolloutBuffer,
        rollout_buffer_kwargs={"buffers": buffers, "use_threads": use_threads},
    )
    assert together.equal(weights())


class Broken(RolloutBuffer):
    """Fails when the method named ``failing`` is called."""

    failing = ""

    def add(self, *args: Any, **kwargs: Any) -> None:
        self._maybe_fail("add")
        super().add(*args, **kwargs)

    def compute_returns_and_advantage(self, *args: Any, **kwargs: Any) -> None:
        self._maybe_fail("compute")
        super().compute_returns_and_advantage(*args, **kwargs)

    def _get_samples(self, *args: Any, **kwargs: Any) -> Any:
        self._maybe_fail("get")
        return super()._get_samples(*args, **kwargs)

    def _maybe_fail(self, name: str) -> None:
        if self.failing == name:
            raise ZeroDivisionError(f"{name} in {threading.current_thread().name}")


def use(buffer: RolloutBuffer) -> None:
    fill([buffer])
    list(buffer.get(5))


@pytest.mark.parametrize("use_threads", [False, True])
@pytest.mark.parametrize("method", ["add", "compute", "get"])
def test_an_error_in_any_buffer_is_seen(method: str, use_threads: bool) -> None:
    broken = alone(buffer_class=Broken)
    together = made([RolloutBuffer, broken], use_threads)
    broken.failing = method
    in_thread = use_threads and method != "get"  # first batches are drawn one after the other
    with pytest.raises(ZeroDivisionError, match="vec-buf" if in_thread else "MainThread"):
        use(together)


def test_it_survives_pickling() -> None:
    together = made([RolloutBuffer, CompressedRolloutBuffer], use_threads=True)
    fill([together])
    copy = pickle.loads(pickle.dumps(together))
    np.testing.assert_array_equal(copy.returns, together.returns)
    fill([copy])


def test_mistakes_are_errors() -> None:
    with pytest.raises(ConfigurationError, match="at least one"):
        made(None)
    with pytest.raises(ConfigurationError, match="12 steps of 3 environments, not 12 of 1"):
        made([RolloutBuffer, RolloutBuffer(STEPS, IMAGES, ACTIONS, "cpu")])
    with pytest.raises(AttributeError, match="no_such"):
        _ = made([RolloutBuffer]).no_such
