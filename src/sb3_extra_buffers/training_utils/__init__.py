"""Around training: environments, evaluation, buffers filled ahead, and what a buffer costs while a model learns."""

from __future__ import annotations

from sb3_extra_buffers.training_utils.atari import make_env
from sb3_extra_buffers.training_utils.buffer_warmup import warm_up
from sb3_extra_buffers.training_utils.callbacks import BufferStatsCallback
from sb3_extra_buffers.training_utils.eval_model import Evaluation, eval_model

__all__ = ["BufferStatsCallback", "Evaluation", "eval_model", "make_env", "warm_up"]
