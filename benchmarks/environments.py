"""The environments that benchmarks record, each with the reason why it is included.

The library was not tuned on most of them. They were chosen before anything was measured on them, so the list includes
some that compress badly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecTransposeImage

ATARI_STACK = 4
CAMERA_STACK = 3
EXTRA = "environments"
"""The virtual environment with packages that the library never needs: ``requirements/environments.txt``."""
NOISE = "noise"
"""The name of a recording of random bytes, which no environment produces."""

# Functions import sb3_extra_buffers only when they make an environment: processes that measure other libraries on a
# recording import this module, too, but not the library.


def make_atari(env_id: str, n_envs: int, seed: int) -> VecEnv:
    """Make Atari environments with SB3's wrappers: 84x84 grey frames, stacks of four, channels first."""
    from sb3_extra_buffers.training_utils import atari

    return atari.make_env(env_id, n_envs, vec_env_cls=DummyVecEnv, framestack=ATARI_STACK, seed=seed)


def make_atari_rgb(env_id: str, n_envs: int, seed: int) -> VecEnv:
    """Make Atari environments that show the whole screen, 210x160 RGB, one frame at a time, channels first."""
    import ale_py  # noqa: F401  # registers the games

    return VecTransposeImage(make_vec_env(env_id, n_envs, seed))


def make_doom(view: Literal["rgb", "mask"], n_envs: int, seed: int) -> VecEnv:
    """Make Doom deathmatches that show one frame at a time, channels first."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))  # for doom
    import doom

    return doom.make_env("deathmatch", n_envs, view=view, seed=seed)


def make_images(make: Callable[[], gym.Env[Any, Any]], n_envs: int, seed: int, stack: int = 1) -> VecEnv:
    """Make environments that show RGB images, channels first."""
    env: VecEnv = make_vec_env(make, n_envs, seed)
    if stack > 1:
        env = VecFrameStack(env, n_stack=stack)
    return VecTransposeImage(env)


def make_minigrid() -> gym.Env[Any, Any]:
    import minigrid  # noqa: F401  # registers the environments
    from minigrid.wrappers import ImgObsWrapper, RGBImgPartialObsWrapper

    env: gym.Env[Any, Any] = ImgObsWrapper(RGBImgPartialObsWrapper(gym.make("MiniGrid-DoorKey-8x8-v0")))
    return env


def make_crafter() -> gym.Env[Any, Any]:
    from benchmarks.adapters import CrafterEnv

    return CrafterEnv()


def make_procgen() -> gym.Env[Any, Any]:
    from benchmarks.adapters import ProcgenEnv

    return ProcgenEnv("coinrun")


def make_camera() -> gym.Env[Any, Any]:
    """HalfCheetah, seen through its camera."""
    os.environ.setdefault("MUJOCO_GL", "osmesa")  # Debian: apt-get install libosmesa6
    os.environ.setdefault("LP_NUM_THREADS", "1")  # threads of the software renderer: more are slower here
    env = gym.make("HalfCheetah-v5", render_mode="rgb_array", width=84, height=84)
    # With shadows and antialiasing, the software renderer reaches only a few frames per second.
    quality = env.unwrapped.model.vis.quality  # type: ignore[attr-defined]
    quality.shadowsize = quality.offsamples = 0
    return gym.wrappers.AddRenderObservation(env)


def make_fetch() -> gym.Env[Any, Any]:
    import gymnasium_robotics

    gym.register_envs(gymnasium_robotics)
    return gym.make("FetchPush-v4")


@dataclass(frozen=True)
class Environment:
    """How to make and to play an environment."""

    make: Callable[[int, int], VecEnv]
    """Takes the number of environments and the seed."""
    kind: Literal["atari", "rgb", "mask", "vector"]
    why: str
    """What is special about it, in a few words."""
    stack: int = 1
    repeat: float = 0.75
    """The probability that a random policy repeats its last action. Without repeats, most games hardly get anywhere."""
    weights: tuple[float, ...] | None = None
    """The relative frequency of each discrete action; ``None`` if all are equally frequent."""
    extra: bool = False
    """Whether it needs packages of :data:`EXTRA`."""
    is_repeatable: bool = True
    """Whether the same seed gives the same observations in another process."""


def _atari(game: str, why: str, repeat: float = 0.75) -> Environment:
    return Environment(partial(make_atari, f"{game}NoFrameskip-v4"), "atari", why, ATARI_STACK, repeat)


def _gym(env_id: str, why: str, repeat: float = 0.75, extra: bool = False) -> Environment:
    return Environment(partial(make_vec_env, env_id), "vector", why, repeat=repeat, extra=extra)


ENVIRONMENTS = {
    # The methods were tuned on the first three, whose recordings were played without repeated actions.
    "mspacman": _atari("MsPacman", "a still maze, five sprites", repeat=0),
    "pong": _atari("Pong", "a still court, three sprites", repeat=0),
    "breakout": _atari("Breakout", "a still wall that loses bricks", repeat=0),
    "enduro": _atari("Enduro", "3-D: the road moves, and day turns to night"),
    "riverraid": _atari("Riverraid", "scrolls down the whole screen"),
    "asteroids": _atari("Asteroids", "sprites that flicker on black"),
    "battlezone": _atari("BattleZone", "3-D from inside a tank: everything turns"),
    "seaquest": _atari("Seaquest", "many sprites cross a still background"),
    "spaceinvaders": _atari("SpaceInvaders", "36 sprites move at once, shots flicker"),
    "qbert": _atari("Qbert", "a still pyramid whose cubes change colour"),
    "montezuma": _atari("MontezumaRevenge", "a still room with one figure: the easiest kind"),
    "roadrunner": _atari("RoadRunner", "scrolls sideways"),
    # Held out: nothing is tuned on these.
    "alien": _atari("Alien", "a still maze full of dots"),
    "assault": _atari("Assault", "a few large sprites"),
    "centipede": _atari("Centipede", "many small sprites, and colours that change"),
    "crazyclimber": _atari("CrazyClimber", "scrolls down a wall of windows"),
    "demonattack": _atari("DemonAttack", "sprites that flicker and split"),
    "freeway": _atari("Freeway", "ten lanes of cars"),
    "robotank": _atari("Robotank", "3-D from inside a tank, with a radar"),
    "solaris": _atari("Solaris", "3-D in space, and a map"),
    "timepilot": _atari("TimePilot", "clouds move in any direction"),
    "upndown": _atari("UpNDown", "a winding road scrolls"),
    "yarsrevenge": _atari("YarsRevenge", "a zone of noise that never rests"),
    "zaxxon": _atari("Zaxxon", "scrolls diagonally"),
    "carracing": Environment(
        partial(make_images, partial(gym.make, "CarRacing-v3", continuous=False)),
        "rgb",
        "96x96 RGB: the view turns and zooms with the car",
        weights=(1, 2, 2, 4, 0.2),  # mostly gas: with equal weights the car stands still
        extra=True,
    ),
    "crafter": Environment(
        partial(make_images, make_crafter),
        "rgb",
        "64x64 RGB: textured tiles, noise at night",
        extra=True,
        is_repeatable=False,  # it iterates over sets of objects
    ),
    "minigrid": Environment(partial(make_images, make_minigrid), "rgb", "56x56 RGB: a few flat tiles", extra=True),
    "camera": Environment(
        partial(make_images, make_camera, stack=CAMERA_STACK),
        "rgb",
        "84x84 RGB, stacks of three: a MuJoCo camera that follows HalfCheetah",
        stack=CAMERA_STACK,
        extra=True,
        is_repeatable=False,  # some of its textures are random
    ),
    "procgen": Environment(
        partial(make_images, make_procgen), "rgb", "64x64 RGB: CoinRun, painted backgrounds that scroll", extra=True
    ),
    "mspacman_rgb": Environment(
        partial(make_atari_rgb, "ALE/MsPacman-v5"), "rgb", "210x160 RGB: the whole screen", repeat=0
    ),
    "doom_rgb": Environment(partial(make_doom, "rgb"), "rgb", "120x160 RGB: 3-D, textured", repeat=0),
    "doom_labels": Environment(partial(make_doom, "mask"), "mask", "120x160: segmentation masks", repeat=0),
    "pendulum": _gym("Pendulum-v1", "3 float32 numbers"),
    "cartpole": _gym("CartPole-v1", "4 float32 numbers, short episodes"),
    "acrobot": _gym("Acrobot-v1", "6 float32 numbers", repeat=0),
    "halfcheetah": _gym("HalfCheetah-v5", "17 float64 numbers", extra=True),
    "ant": _gym("Ant-v5", "105 float64 numbers, many of them seldom change", extra=True),
    "humanoid": _gym("Humanoid-v5", "348 float64 numbers, some of them constant", extra=True),
    "fetch": Environment(
        partial(make_vec_env, make_fetch),
        "vector",
        "a Dict of 25 + 3 + 3 float64 numbers: goals, as for HER",
        extra=True,
    ),
}
NAMES = tuple(ENVIRONMENTS)
_GAMES = tuple(name for name, environment in ENVIRONMENTS.items() if environment.kind == "atari")
WORKLOADS: dict[str, tuple[str, ...]] = {
    "atari": _GAMES[:12],
    "rgb": ("carracing", "crafter", "minigrid", "camera", "procgen"),
    "vectors": ("pendulum", "cartpole", "halfcheetah", "ant", "humanoid", "fetch"),
}
"""Groups of environments on which the library promises speed and memory. :mod:`.targets` has a target per group."""
HELD_OUT = _GAMES[12:]
"""Games on which nothing is tuned, to check that the promise holds for other games, too."""


def make_env(name: str, n_envs: int, seed: int) -> VecEnv:
    """Make ``n_envs`` copies of the environment called ``name``, one of :data:`NAMES`."""
    if name not in ENVIRONMENTS:
        raise ValueError(f"unknown environment {name!r}; the known ones are {', '.join(NAMES)}")
    return ENVIRONMENTS[name].make(n_envs, seed)
