"""Fill a record buffer during training, or whenever an environment is stepped.

A step is recorded as the frame on which an action was chosen, that action, and the reward for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, SupportsFloat

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from stable_baselines3.common.callbacks import BaseCallback

from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.recording.base import BaseRecordBuffer
from sb3_extra_buffers.recording.record_buffer import RecordBuffer

Source = Literal["auto", "render", "observation"]
Features = Callable[[dict[str, Any]], Sequence[Any]]


class _Recorder:
    """Adds steps to a buffer, which it makes to measure when the first step comes, unless there is one already."""

    def __init__(self, buffer: BaseRecordBuffer | None, size: int, features: Features | None) -> None:
        self.buffer = buffer
        self.size = size
        self.features = features

    def add(self, frame: Any, reward: SupportsFloat, action: Any, info: dict[str, Any]) -> None:
        if self.buffer is None:
            self.buffer = buffer_for(np.asarray(frame), np.asarray(action), self.size)
        self.buffer.add(frame, reward, action, self.features(info) if self.features else None)


class RecordCallback(BaseCallback):
    """Records one of the environments that a model trains in::

        recorder = RecordCallback()
        model.learn(10_000, callback=recorder)
        recorder.buffer.save_video("training.mp4")

    :param buffer: Where to record; by default one is made when the first frame is there.
    :param source: What a frame is: what the environment renders, or the observation. ``"auto"`` renders where the
        environment has ``render_mode="rgb_array"``.
    :param env_index: Which of the environments.
    :param size: How many steps the buffer holds that is made by default.
    :param features: What else to record of a step, made from its ``info``.
    """

    def __init__(
        self,
        buffer: BaseRecordBuffer | None = None,
        source: Source = "auto",
        env_index: int = 0,
        size: int = 40_000,
        features: Features | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        _check_source(source)
        self.source = source
        self.env_index = env_index
        self._recorder = _Recorder(buffer, size, features)
        self._frame: Any = None

    @property
    def buffer(self) -> Any:
        """The recording; ``None`` before the first step if it is to be made then."""
        return self._recorder.buffer

    def _on_training_start(self) -> None:
        self._frame = self._look(self.model._last_obs)

    def _on_step(self) -> bool:
        i = self.env_index
        actions = self.locals.get("clipped_actions", self.locals["actions"])
        self._recorder.add(self._frame, self.locals["rewards"][i], actions[i], self.locals["infos"][i])
        self._frame = self._look(self.locals["new_obs"])
        return True

    def _look(self, observations: Any) -> npt.NDArray[Any]:
        if _renders(self.source, self.training_env.render_mode):
            return _rendered(self.training_env.env_method("render", indices=self.env_index)[0])
        return _observed(observations if isinstance(observations, dict) else observations[self.env_index])


class RecordEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Records an environment whenever it is stepped::

        env = RecordEnv(gym.make("CartPole-v1", render_mode="rgb_array"))
        evaluate_policy(model, env)
        env.buffer.save_video("evaluation.mp4")

    The parameters are those of :class:`RecordCallback`.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        buffer: BaseRecordBuffer | None = None,
        source: Source = "auto",
        size: int = 40_000,
        features: Features | None = None,
    ) -> None:
        super().__init__(env)
        _check_source(source)
        self.source = source
        self._recorder = _Recorder(buffer, size, features)
        self._frame: Any = None

    @property
    def buffer(self) -> Any:
        """The recording; ``None`` before the first step if it is to be made then."""
        return self._recorder.buffer

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._frame = self._look(observation)
        return observation, info

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._recorder.add(self._frame, reward, action, info)
        self._frame = self._look(observation)
        return observation, reward, terminated, truncated, info

    def _look(self, observation: Any) -> npt.NDArray[Any]:
        if _renders(self.source, self.env.render_mode):
            return _rendered(self.env.render())
        return _observed(observation)


def buffer_for(frame: npt.NDArray[Any], action: npt.NDArray[Any], size: int) -> RecordBuffer:
    """A buffer of ``size`` steps for frames and actions like these. Channels are a frame's shorter outer axis."""
    shape = frame.shape if frame.ndim == 3 else (*frame.shape, 1)
    channels_first = shape[0] < shape[2]
    return RecordBuffer(
        res=shape[1:] if channels_first else shape[:2],
        ch_num=shape[0] if channels_first else shape[2],
        size=size,
        dtypes=[frame.dtype, np.float32],
        action_shape=action.shape,
        action_dtype=action.dtype,
    )


def _check_source(source: str) -> None:
    if source not in ("auto", "render", "observation"):
        raise ConfigurationError(f"source must be 'auto', 'render' or 'observation', not {source!r}.")


def _renders(source: Source, render_mode: str | None) -> bool:
    if source == "render" and render_mode != "rgb_array":
        raise ConfigurationError(
            f"The environment's render_mode is {render_mode!r}: make it with render_mode='rgb_array' to record it."
        )
    return source == "render" or (source == "auto" and render_mode == "rgb_array")


def _rendered(frame: Any) -> npt.NDArray[Any]:
    if not isinstance(frame, np.ndarray):
        raise ConfigurationError(
            f"The environment rendered a {type(frame).__name__} instead of an array of pixels. "
            "Make it with render_mode='rgb_array'."
        )
    return frame.copy()  # some environments draw the next frame into the same memory


def _observed(observation: Any) -> npt.NDArray[Any]:
    if not isinstance(observation, np.ndarray) or observation.ndim not in (2, 3):
        raise ConfigurationError(
            f"Observations are no images ({getattr(observation, 'shape', type(observation).__name__)}): make the "
            "environment with render_mode='rgb_array' to record what it renders."
        )
    return observation.copy()
