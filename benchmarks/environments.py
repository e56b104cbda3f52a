"""The environments that benchmarks play: Atari as SB3 prepares it, and Doom with its segmentation masks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecTransposeImage

ATARI = {
    "mspacman": "MsPacmanNoFrameskip-v4",
    "pong": "PongNoFrameskip-v4",
    "breakout": "BreakoutNoFrameskip-v4",
}
DOOM: dict[str, Literal["screen", "labels"]] = {"doom_rgb": "screen", "doom_labels": "labels"}
NAMES = (*ATARI, *DOOM)

ATARI_STACK = 4

DOOM_CLASSES = ("Self", "Player", "Monster", "Weapon", "Ammo", "Health", "Armor", "Key", "Explosive", "Gibs", "SFX")
"""ViZDoom's categories of objects, in the order in which masks number them; 0 is the level, 255 any other object."""


def make_env(name: str, n_envs: int, seed: int) -> VecEnv:
    """Make ``n_envs`` copies of the environment called ``name``, one of :data:`NAMES`."""
    if name in ATARI:
        return make_atari(ATARI[name], n_envs, seed)
    if name in DOOM:
        return make_doom(DOOM[name], n_envs, seed)
    raise ValueError(f"unknown environment {name!r}; the known ones are {', '.join(NAMES)}")


def make_atari(env_id: str, n_envs: int, seed: int) -> VecEnv:
    """Make Atari environments with SB3's wrappers: 84x84 grey frames, stacks of four, channel first."""
    import ale_py

    gym.register_envs(ale_py)
    return VecTransposeImage(VecFrameStack(make_atari_env(env_id, n_envs=n_envs, seed=seed), ATARI_STACK))


def make_doom(view: Literal["screen", "labels"], n_envs: int, seed: int) -> VecEnv:
    """Make Doom deathmatches that show one frame at a time, channel first."""
    env = DummyVecEnv([lambda: DoomDeathmatch(view)] * n_envs)
    env.seed(seed)
    return VecTransposeImage(env)


class DoomDeathmatch(gym.Env[npt.NDArray[np.uint8], np.int64]):
    """ViZDoom's deathmatch at 160x120, seen as RGB or as a mask of what kind of object each pixel shows."""

    frame_skip = 4

    def __init__(self, view: Literal["screen", "labels"]) -> None:
        import vizdoom

        self.view = view
        self.game = vizdoom.DoomGame()
        self.game.load_config(str(Path(vizdoom.scenarios_path) / "deathmatch.cfg"))
        self.game.set_doom_config_path(str(Path(tempfile.gettempdir()) / "vizdoom.ini"))
        self.game.set_window_visible(False)
        self.game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
        self.game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        self.game.set_labels_buffer_enabled(True)
        self.game.set_available_buttons([b for b in self.game.get_available_buttons() if vizdoom.is_binary_button(b)])
        self.game.init()

        channels = 3 if view == "screen" else 1
        self.observation_space = gym.spaces.Box(0, 255, (120, 160, channels), np.uint8)
        self.action_space = gym.spaces.Discrete(self.game.get_available_buttons_size())
        self.buttons = np.eye(self.game.get_available_buttons_size(), dtype=int).tolist()
        self.frame = np.zeros(self.observation_space.shape, np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.game.set_seed(seed)
        self.game.new_episode()
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[npt.NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        reward = self.game.make_action(self.buttons[int(action)], self.frame_skip)
        truncated = self.game.is_episode_timeout_reached()
        terminated = self.game.is_episode_finished() and not truncated
        return self._observe(), reward, terminated, truncated, {}

    def close(self) -> None:
        self.game.close()

    def _observe(self) -> npt.NDArray[np.uint8]:
        state = self.game.get_state()
        # ViZDoom has no state once an episode is over; the last frame then stands for the terminal one.
        if state is not None:
            self.frame = state.screen_buffer if self.view == "screen" else self._mask(state)[..., np.newaxis]
        return self.frame

    @staticmethod
    def _mask(state: Any) -> npt.NDArray[np.uint8]:
        """Replace the number of each object in ViZDoom's labels by that of its class."""
        numbers = {category: number for number, category in enumerate(DOOM_CLASSES, start=1)}
        class_of: npt.NDArray[np.uint8] = np.zeros(256, np.uint8)
        for label in state.labels:
            class_of[label.value] = numbers.get(label.object_category, 255)
        mask: npt.NDArray[np.uint8] = class_of[state.labels_buffer]
        return mask
