"""ViZDoom environments with RGB images or semantic-segmentation masks as observations."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack, VecTransposeImage

from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.errors import ConfigurationError

View = Literal["rgb", "mask", "both"]

CLASSES = ("Self", "Player", "Monster", "Weapon", "Ammo", "Health", "Armor", "Key", "Explosive", "Gibs", "SFX")
"""ViZDoom's object categories. Masks number them from 1, in this order; 0 is the level, and 255 any other object."""


class VizdoomEnv(gym.Env[Any, np.int64]):
    """A ViZDoom scenario. Each action presses one button for a few frames. Needs the extra ``vizdoom``.

    :param scenario: A scenario of ViZDoom, such as ``"deathmatch"`` or ``"basic"``, or the path of a ``.cfg`` file.
    :param view: What to observe: ``"rgb"``, ``"mask"`` (see :data:`CLASSES`) or ``"both"``.
    :param resolution: Height and width. ViZDoom must support it.
    :param frame_skip: For how many frames each action is repeated.
    :param spread: Spread the class numbers over 0 to 255, so that a network that divides by 255 can tell them apart.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 35}  # noqa: RUF012  # as gymnasium declares it

    def __init__(
        self,
        scenario: str | Path = "deathmatch",
        view: View = "mask",
        resolution: tuple[int, int] = (120, 160),
        frame_skip: int = 4,
        spread: bool = False,
        render_mode: str | None = None,
    ) -> None:
        if view not in ("rgb", "mask", "both"):
            raise ConfigurationError(f"view must be 'rgb', 'mask' or 'both', not {view!r}.")
        self.view = view
        self.frame_skip = frame_skip
        self.render_mode = render_mode
        self.game = _start(scenario, resolution)
        self._value_of_class = {name: number * (20 if spread else 1) for number, name in enumerate(CLASSES, start=1)}
        parts: dict[str, spaces.Space[Any]] = {
            "rgb": spaces.Box(0, 255, (*resolution, 3), np.uint8),
            "mask": spaces.Box(0, 255, (*resolution, 1), np.uint8),
        }
        self.observation_space = spaces.Dict(parts) if view == "both" else parts[view]
        n_buttons = self.game.get_available_buttons_size()
        self.action_space = spaces.Discrete(n_buttons)
        self._buttons = np.eye(n_buttons, dtype=int).tolist()
        self._rgb: npt.NDArray[np.uint8] = np.zeros((*resolution, 3), np.uint8)
        self._mask: npt.NDArray[np.uint8] = np.zeros((*resolution, 1), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.game.set_seed(seed)
        self.game.new_episode()
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = self.game.make_action(self._buttons[int(action)], self.frame_skip)
        truncated = self.game.is_episode_timeout_reached()
        terminated = self.game.is_episode_finished() and not truncated
        return self._observe(), reward, terminated, truncated, {}

    def render(self) -> npt.NDArray[np.uint8] | None:
        """The RGB image, for every view."""
        return self._rgb if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        self.game.close()

    def _observe(self) -> Any:
        state = self.game.get_state()
        # ViZDoom has no state after the end of an episode: return the last frame again.
        if state is not None:
            self._rgb = state.screen_buffer
            self._mask = self._classes(state)[..., np.newaxis]
        seen: dict[str, npt.NDArray[np.uint8]] = {"rgb": self._rgb, "mask": self._mask}
        return seen if self.view == "both" else seen[self.view]

    def _classes(self, state: Any) -> npt.NDArray[np.uint8]:
        """Turn ViZDoom's labels, which are object numbers, into class numbers."""
        value_of_object: npt.NDArray[np.uint8] = np.zeros(256, np.uint8)
        for label in state.labels:
            value_of_object[label.value] = self._value_of_class.get(label.object_category, 255)
        values: npt.NDArray[np.uint8] = value_of_object[state.labels_buffer]
        return values


def make_env(
    scenario: str | Path = "deathmatch",
    n_envs: int = 1,
    vec_env_cls: type[DummyVecEnv] | type[SubprocVecEnv] = DummyVecEnv,
    framestack: int = 1,
    seed: int | None = None,
    **kwargs: Any,
) -> VecEnv:
    """Make ``n_envs`` copies of a scenario, with SB3's ``Monitor`` and channels first.

    :param framestack: Frames per observation; with 1 or less, frames are not stacked.
    :param seed: Seed of the first environment; the others use the following numbers.
    :param kwargs: Further arguments of :class:`VizdoomEnv`.
    """
    kwargs.setdefault("render_mode", "rgb_array")
    env: VecEnv = make_vec_env(
        functools.partial(VizdoomEnv, scenario, **kwargs), n_envs=n_envs, seed=seed, vec_env_cls=vec_env_cls
    )
    if framestack > 1:
        env = VecFrameStack(env, n_stack=framestack)
    return VecTransposeImage(env)


def _start(scenario: str | Path, resolution: tuple[int, int]) -> Any:
    vizdoom = require("vizdoom", "Doom", "vizdoom")
    path = Path(vizdoom.scenarios_path) / f"{scenario}.cfg"
    if not path.exists():
        path = Path(scenario)
    if not path.is_file():
        known = ", ".join(sorted(path.stem for path in Path(vizdoom.scenarios_path).glob("*.cfg")))
        raise ConfigurationError(f"There is no scenario {str(scenario)!r}. ViZDoom has: {known}.")
    height, width = resolution
    screen = getattr(vizdoom.ScreenResolution, f"RES_{width}X{height}", None)
    if screen is None:
        raise ConfigurationError(
            f"ViZDoom has no resolution of {height} by {width} (height by width). Use one such as (240, 320)."
        )
    game = vizdoom.DoomGame()
    game.load_config(str(path))
    game.set_doom_config_path(str(Path(tempfile.gettempdir()) / "vizdoom.ini"))  # not in the working directory
    game.set_window_visible(False)
    game.set_mode(vizdoom.Mode.PLAYER)
    game.set_screen_resolution(screen)
    game.set_screen_format(vizdoom.ScreenFormat.RGB24)
    game.set_labels_buffer_enabled(True)
    game.set_available_buttons([button for button in game.get_available_buttons() if vizdoom.is_binary_button(button)])
    game.init()
    return game
