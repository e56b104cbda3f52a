"""The fields of a batch, where no other launch brings them along."""

from __future__ import annotations

import torch as th
import triton
import triton.language as tl

from sb3_extra_buffers.gpu_buffers.kernels.batch import FieldBatch, field_arguments, field_constants, field_type
from sb3_extra_buffers.gpu_buffers.kernels.device_functions import copy_fields
from sb3_extra_buffers.gpu_buffers.kernels.launching import Launcher


@triton.jit(do_not_specialize=["env_row", "n"])
def _gather_fields(
    places, fields, actions, rewards, dones, env_row, n,
    ROW_WORDS: tl.constexpr, ACTION_WORDS: tl.constexpr, ACTION_BLOCK: tl.constexpr,
    ACTIONS_AT: tl.constexpr, REWARDS_AT: tl.constexpr, DONES_AT: tl.constexpr, TIMEOUTS_AT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    copy_fields(
        fields, tl.load(places + row), tl.load(places + env_row * n + row), row, actions, rewards, dones,
        ROW_WORDS, ACTION_WORDS, ACTION_BLOCK, ACTIONS_AT, REWARDS_AT, DONES_AT, TIMEOUTS_AT,
    )  # fmt: skip


_launch = Launcher(_gather_fields, n_warps=1)


def gather_fields(places: th.Tensor, env_row: int, batch: FieldBatch) -> None:
    """Fill ``batch`` for the slots in the first row of ``places`` and the environments in row ``env_row``."""
    n, constants = places.shape[1], field_constants(batch)
    _launch(
        batch.rewards.device, (n, 1), (constants, field_type(batch)),
        places, *field_arguments(batch, batch.rewards), env_row, n, *constants,
    )  # fmt: skip
