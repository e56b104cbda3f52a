"""Record an environment while a model trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from stable_baselines3.common.callbacks import BaseCallback

from sb3_extra_buffers.compressed.rows import on_host
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.recording.record_buffer import BaseRecordBuffer, RecordBuffer

Source = Literal["auto", "render", "observation"]


class RecordCallback(BaseCallback):
    """Records one of the environments that a model trains in::

        recorder = RecordCallback()
        model.learn(10_000, callback=recorder)
        recorder.buffer.save_video("training.mp4")

    A recorded step is a frame, the action that the model chose for it, and the reward of that action.

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
        features: Callable[[dict[str, Any]], Sequence[Any]] | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        if source not in ("auto", "render", "observation"):
            raise ConfigurationError(f"source must be 'auto', 'render' or 'observation', not {source!r}.")
        self.buffer: Any = buffer  # None before the first step if no buffer was passed
        self.source = source
        self.env_index = env_index
        self.size = size
        self.features = features
        self._frame: Any = None

    def _on_training_start(self) -> None:
        if getattr(self.model, "collectors", None) is not None:
            raise ConfigurationError(
                "A model with collectors has no environment of its own to record. Leave out RecordCallback, and record "
                "an evaluation: eval_model(..., buffer=RecordBuffer(...))."
            )
        self._frame = self._current_frame(self.model._last_obs)

    def _on_step(self) -> bool:
        i = self.env_index
        # On a device, see on_device(), these are tensors.
        action = on_host(self.locals.get("clipped_actions", self.locals["actions"])[i])
        reward, info = on_host(self.locals["rewards"][i]), self.locals["infos"][i]
        if self.buffer is None:
            self.buffer = _buffer_for(self._frame, np.asarray(action), self.size)
        self.buffer.add(self._frame, reward, action, self.features(info) if self.features is not None else None)
        self._frame = self._current_frame(self.locals["new_obs"])
        return True

    def _current_frame(self, observations: Any) -> npt.NDArray[Any]:
        """The frame for which the model chooses the next action."""
        can_render = self.training_env.render_mode == "rgb_array"
        if self.source == "render" or (self.source == "auto" and can_render):
            frame = self.training_env.env_method("render", indices=self.env_index)[0] if can_render else None
            if not isinstance(frame, np.ndarray):
                raise ConfigurationError(
                    f"The environment, with render_mode={self.training_env.render_mode!r}, rendered no array of "
                    "pixels. Make it with render_mode='rgb_array'."
                )
        else:
            frame = None if isinstance(observations, dict) else on_host(observations[self.env_index])
            if frame is None or frame.ndim not in (2, 3):
                raise ConfigurationError(
                    f"The observations are not images: {self.training_env.observation_space}. Make the environment "
                    "with render_mode='rgb_array' to record what it renders."
                )
        return frame.copy()  # some environments write the next frame into the same memory


def _buffer_for(frame: npt.NDArray[Any], action: npt.NDArray[Any], size: int) -> RecordBuffer:
    """Create a buffer that fits the frame and the action. The shorter of the first and last axis holds the channels."""
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
