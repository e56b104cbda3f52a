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
from sb3_extra_buffers.recording.record_buffer import BaseRecordBuffer, RecordBuffer

Source = Literal["auto", "render", "observation"]
Features = Callable[[dict[str, Any]], Sequence[Any]]


class _Recorder:
    """Adds steps to a buffer, which it creates with the first step unless there is one already."""

    def __init__(self, buffer: BaseRecordBuffer | None, source: Source, size: int, features: Features | None) -> None:
        if source not in ("auto", "render", "observation"):
            raise ConfigurationError(f"source must be 'auto', 'render' or 'observation', not {source!r}.")
        self.buffer = buffer
        self.source = source
        self.size = size
        self.features = features
        self._frame: Any = None

    def keep_frame(self, observation: Any, render_mode: str | None, render: Callable[[], Any]) -> None:
        """Keep the frame on which the next action will be chosen."""
        if self.source == "render" and render_mode != "rgb_array":
            raise ConfigurationError(
                f"The environment's render_mode is {render_mode!r}: make it with render_mode='rgb_array' to record it."
            )
        if self.source == "observation" or render_mode != "rgb_array":
            frame = observation
            if not isinstance(frame, np.ndarray) or frame.ndim not in (2, 3):
                raise ConfigurationError(
                    f"Observations are no images ({getattr(frame, 'shape', type(frame).__name__)}): make the "
                    "environment with render_mode='rgb_array' to record what it renders."
                )
        else:
            frame = render()
            if not isinstance(frame, np.ndarray):
                raise ConfigurationError(
                    f"The environment rendered a {type(frame).__name__} instead of an array of pixels. "
                    "Make it with render_mode='rgb_array'."
                )
        self._frame = frame.copy()  # some environments write the next frame into the same memory

    def add(self, reward: SupportsFloat, action: Any, info: dict[str, Any]) -> None:
        if self.buffer is None:
            self.buffer = _buffer_for(self._frame, np.asarray(action), self.size)
        self.buffer.add(self._frame, reward, action, self.features(info) if self.features else None)


class RecordCallback(BaseCallback):
    """Records one of the environments that a model trains in::

        recorder = RecordCallback()
        model.learn(10_000, callback=recorder)
        recorder.buffer.save_video("training.mp4")

    :param buffer: Where to record; by default, a buffer is created for the first frame.
    :param source: What a frame is: what the environment renders, or the observation. ``"auto"`` renders if the
        environment has ``render_mode="rgb_array"``.
    :param env_index: Which environment to record.
    :param size: How many steps the created buffer holds.
    :param features: Computes further values to record from the ``info`` of a step.
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
        self.env_index = env_index
        self._recorder = _Recorder(buffer, source, size, features)

    @property
    def buffer(self) -> Any:
        """The recording; ``None`` before the first step if no buffer was passed."""
        return self._recorder.buffer

    def _on_training_start(self) -> None:
        self._keep_frame(self.model._last_obs)

    def _on_step(self) -> bool:
        i = self.env_index
        actions = self.locals.get("clipped_actions", self.locals["actions"])
        self._recorder.add(self.locals["rewards"][i], actions[i], self.locals["infos"][i])
        self._keep_frame(self.locals["new_obs"])
        return True

    def _keep_frame(self, observations: Any) -> None:
        observation = observations if isinstance(observations, dict) else observations[self.env_index]
        render_mode = self.training_env.render_mode
        self._recorder.keep_frame(
            observation, render_mode, lambda: self.training_env.env_method("render", indices=self.env_index)[0]
        )


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
        self._recorder = _Recorder(buffer, source, size, features)

    @property
    def buffer(self) -> Any:
        """The recording; ``None`` before the first step if no buffer was passed."""
        return self._recorder.buffer

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._recorder.keep_frame(observation, self.env.render_mode, self.env.render)
        return observation, info

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._recorder.add(reward, action, info)
        self._recorder.keep_frame(observation, self.env.render_mode, self.env.render)
        return observation, reward, terminated, truncated, info


def _buffer_for(frame: npt.NDArray[Any], action: npt.NDArray[Any], size: int) -> RecordBuffer:
    """A buffer for such frames and actions. The channels are the shorter of a frame's first and last axis."""
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
