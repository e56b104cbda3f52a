"""Does training give exactly the same network as with SB3's buffers, over a long history of real frames?

    python -m benchmarks.studies.training_exactness

Each algorithm plays an Atari game twice, with SB3's buffer and with a compressed one and its default settings, from the
same seed. On-policy algorithms collect at least 60 rollouts, the others three times what their buffer holds. At the
end, all parameters must be equal, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from sb3_contrib import QRDQN, MaskablePPO, RecurrentPPO
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.atari_wrappers import WarpFrame
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecTransposeImage

from benchmarks.networks import SmallCnn
from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.compressed import CompressedReplayBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.compressed.maskable_buffer import CompressedMaskableRolloutBuffer
from sb3_extra_buffers.compressed.recurrent_buffer import CompressedRecurrentPPO
from sb3_extra_buffers.training_utils.atari import make_env

N_ENVS = 4
SLOTS = 750
"""Size of the replay buffers, in steps of all environments."""


class SomeActions(gym.Wrapper[Any, Any, Any, Any]):
    """Masks the odd and the even actions in turn, for MaskablePPO."""

    _steps = 0

    def step(self, action: Any) -> Any:
        self._steps += 1
        return self.env.step(action)

    def action_masks(self) -> np.ndarray[Any, Any]:
        space = self.action_space
        assert isinstance(space, spaces.Discrete)
        return np.asarray(np.arange(space.n) % 2 == self._steps % 2)


def _discrete(game: str) -> VecEnv:
    return make_env(f"{game}NoFrameskip-v4", N_ENVS, vec_env_cls=DummyVecEnv, seed=0)


def _masked(game: str) -> VecEnv:
    env = make_atari_env(lambda **kwargs: SomeActions(gym.make(f"{game}NoFrameskip-v4", **kwargs)), N_ENVS, seed=0)
    return VecTransposeImage(VecFrameStack(env, 4))


def _continuous(game: str) -> VecEnv:
    require("ale_py", "Atari", "atari")

    def make() -> gym.Env[Any, Any]:
        return WarpFrame(gym.make(f"ALE/{game}-v5", continuous=True, frameskip=4, max_num_frames_per_episode=4000))

    return VecTransposeImage(VecFrameStack(make_vec_env(make, N_ENVS, seed=0), 4))


class Subject(NamedTuple):
    game: str
    make_env: Callable[[str], VecEnv]
    plain: type[BaseAlgorithm]
    compressed: type[BaseAlgorithm]
    arguments: dict[str, Any]
    """Arguments of both training runs."""
    ours: dict[str, Any]
    """Additional arguments for the compressed buffer."""
    steps: int

    def train(self, compressed: bool, device: str) -> dict[str, th.Tensor]:
        arguments = {**self.arguments, **(self.ours if compressed else {})}
        algorithm: Any = self.compressed if compressed else self.plain
        env = self.make_env(self.game)
        model = algorithm("CnnLstmPolicy" if "Recurrent" in algorithm.__name__ else "CnnPolicy", env, seed=3,
                          device=device, policy_kwargs=self._policy(algorithm), **arguments)  # fmt: skip
        model.learn(self.steps)
        env.close()
        return {name: value.clone() for name, value in model.policy.state_dict().items()}

    def _policy(self, algorithm: type[BaseAlgorithm]) -> dict[str, Any]:
        small = {"features_extractor_class": SmallCnn, "net_arch": [8]}
        return {**small, "lstm_hidden_size": 8} if "Recurrent" in algorithm.__name__ else small


_REPLAY: dict[str, Any] = {"buffer_size": SLOTS * N_ENVS, "learning_starts": 200, "batch_size": 32}
_OUR_REPLAY = {"replay_buffer_class": CompressedReplayBuffer}
_OUR_ROLLOUT = {"rollout_buffer_class": CompressedRolloutBuffer}
_PPO = {"n_steps": 64, "batch_size": 128, "n_epochs": 2}
_ENOUGH = 3 * SLOTS * N_ENVS + 400
_DQN = {**_REPLAY, "target_update_interval": 500}

SUBJECTS = {
    "DQN": Subject("Enduro", _discrete, DQN, DQN, _DQN, _OUR_REPLAY, _ENOUGH),
    "QR-DQN": Subject("Qbert", _discrete, QRDQN, QRDQN, _DQN, _OUR_REPLAY, _ENOUGH),
    "SAC": Subject("MsPacman", _continuous, SAC, SAC, {**_REPLAY, "train_freq": 4}, _OUR_REPLAY, _ENOUGH),
    "PPO": Subject("MsPacman", _discrete, PPO, PPO, _PPO, _OUR_ROLLOUT, 62 * 64 * N_ENVS),
    "A2C": Subject("BattleZone", _discrete, A2C, A2C, {"n_steps": 5}, _OUR_ROLLOUT, 800 * 5 * N_ENVS),
    "MaskablePPO": Subject(
        "Seaquest", _masked, MaskablePPO, MaskablePPO, _PPO,
        {"rollout_buffer_class": CompressedMaskableRolloutBuffer}, 62 * 64 * N_ENVS,
    ),
    "RecurrentPPO": Subject("Riverraid", _discrete, RecurrentPPO, CompressedRecurrentPPO, _PPO, {}, 62 * 64 * N_ENVS),
}  # fmt: skip


def different(left: dict[str, th.Tensor], right: dict[str, th.Tensor]) -> list[str]:
    """The parameters that are not equal, bit for bit."""
    assert left.keys() == right.keys()
    return [name for name, value in left.items() if not th.equal(value, right[name])]


@contextmanager
def _deterministic() -> Iterator[None]:
    threads = th.get_num_threads()
    th.set_num_threads(1)
    th.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        th.set_num_threads(threads)
        th.use_deterministic_algorithms(False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(SUBJECTS)
    parser.add_argument("algorithms", nargs="*", metavar="ALGORITHM", help=f"some of {names}; default: all")
    parser.add_argument("--device", default="cpu", help="where networks are trained (default: cpu)")
    arguments = parser.parse_args()
    unknown = set(arguments.algorithms) - set(SUBJECTS)
    if unknown:
        parser.error(f"there is no algorithm {', '.join(sorted(unknown))}: choose from {names}")
    failed = False
    print(f"{'algorithm':14}{'game':13}{'steps':>8}{'parameters':>12}{'SB3, s':>9}{'ours, s':>9}  networks")
    for name in arguments.algorithms or SUBJECTS:
        subject, seconds, found = SUBJECTS[name], [], []
        with _deterministic():
            for compressed in (False, True):
                began = time.perf_counter()
                found.append(subject.train(compressed, arguments.device))
                seconds.append(time.perf_counter() - began)
        wrong = different(*found)
        failed |= bool(wrong)
        verdict = f"DIFFERENT in {', '.join(wrong)}" if wrong else "identical, bit for bit"
        size = sum(value.numel() for value in found[0].values())
        print(f"{name:14}{subject.game:13}{subject.steps:8,}{size:12,}{seconds[0]:9.1f}{seconds[1]:9.1f}  {verdict}",
              flush=True)  # fmt: skip
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
