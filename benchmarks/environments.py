"""The environments that benchmarks play: Atari as SB3 prepares it and in full colour, Doom, and a task of vectors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecTransposeImage

ATARI = {
    "mspacman": "MsPacmanNoFrameskip-v4",
    "pong": "PongNoFrameskip-v4",
    "breakout": "BreakoutNoFrameskip-v4",
}
ATARI_RGB = {"mspacman_rgb": "ALE/MsPacman-v5"}
DOOM: dict[str, Literal["rgb", "mask"]] = {"doom_rgb": "rgb", "doom_labels": "mask"}
VECTORS = {"acrobot": "Acrobot-v1"}
NAMES = (*ATARI, *ATARI_RGB, *DOOM, *VECTORS)
NOISE = "noise"
"""Not an environment, but listed with them where recordings are."""

ATARI_STACK = 4


def make_env(name: str, n_envs: int, seed: int) -> VecEnv:
    """Make ``n_envs`` copies of the environment called ``name``, one of :data:`NAMES`."""
    if name in ATARI:
        return make_atari(ATARI[name], n_envs, seed)
    if name in ATARI_RGB:
        return make_atari_rgb(ATARI_RGB[name], n_envs, seed)
    if name in DOOM:
        return make_doom(DOOM[name], n_envs, seed)
    if name in VECTORS:
        return make_vec_env(VECTORS[name], n_envs, seed)
    raise ValueError(f"unknown environment {name!r}; the known ones are {', '.join(NAMES)}")


# The library is imported by those who play. A process that measures another library on a recording has none of it.


def make_atari(env_id: str, n_envs: int, seed: int) -> VecEnv:
    """Make Atari environments with SB3's wrappers: 84x84 grey frames, stacks of four, channel first."""
    from sb3_extra_buffers.training_utils import atari

    return atari.make_env(env_id, n_envs, vec_env_cls=DummyVecEnv, framestack=ATARI_STACK, seed=seed)


def make_atari_rgb(env_id: str, n_envs: int, seed: int) -> VecEnv:
    """Make Atari environments that show the whole screen, 210x160 RGB, one frame at a time, channel first."""
    import ale_py  # noqa: F401  # registers the games

    return VecTransposeImage(make_vec_env(env_id, n_envs, seed))


def make_doom(view: Literal["rgb", "mask"], n_envs: int, seed: int) -> VecEnv:
    """Make Doom deathmatches that show one frame at a time, channel first."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))  # whose environment this is
    import doom

    return doom.make_env("deathmatch", n_envs, view=view, seed=seed)
