"""Observations that are stored as they are, and fields without observations, a batch in one launch."""

from __future__ import annotations

import torch as th
import triton
import triton.language as tl

from sb3_extra_buffers.gpu_buffers.kernels import FieldBatch, Launcher, block_size
from sb3_extra_buffers.gpu_buffers.kernels.gather import copy_fields, field_arguments, field_constants, field_type


@triton.jit(do_not_specialize=["n", "n_envs"])
def _gather_rows(
    places, values_0, values_1, out_0, out_1, fields, actions, rewards, dones, n, n_envs,
    PAIR: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ROW_WORDS: tl.constexpr, ACTION_WORDS: tl.constexpr, ACTION_BLOCK: tl.constexpr,
    ACTIONS_AT: tl.constexpr, REWARDS_AT: tl.constexpr, DONES_AT: tl.constexpr, TIMEOUTS_AT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(places + row)
    lane = tl.load(places + (1 + PAIR) * n + row)
    at = part * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(values_0 + (slot * n_envs + lane) * SIZE + at, mask=at < SIZE)
    tl.store(out_0 + row * SIZE + at, found, mask=at < SIZE)
    if PAIR:
        slot_1 = tl.load(places + n + row)
        found = tl.load(values_1 + (slot_1 * n_envs + lane) * SIZE + at, mask=at < SIZE)
        tl.store(out_1 + row * SIZE + at, found, mask=at < SIZE)
    if ACTION_WORDS > 0:
        if part == 0:
            copy_fields(
                fields, slot, lane, row, actions, rewards, dones,
                ROW_WORDS, ACTION_WORDS, ACTION_BLOCK, ACTIONS_AT, REWARDS_AT, DONES_AT, TIMEOUTS_AT,
            )  # fmt: skip


_launch_rows = Launcher(_gather_rows, n_warps=4)


def gather_rows(places: th.Tensor, values: list[th.Tensor], outs: list[th.Tensor], fields: FieldBatch | None) -> None:
    """Copy the rows at ``places`` of ``values``, (slots, environments, bytes), to ``outs``, (n, bytes)."""
    words = values[0].shape[2] % 4 == 0
    if words:
        values, outs = [value.view(th.int32) for value in values], [out.view(th.int32) for out in outs]
    n, size = places.shape[1], values[0].shape[2]
    block = block_size(size, 1024)
    constants = (int(len(outs) > 1), size, block, *field_constants(fields))
    _launch_rows(
        outs[0].device, (n, -(-size // block)), (words, constants, field_type(fields)),
        places, values[0], values[-1], outs[0], outs[-1], *field_arguments(fields, outs[0]),
        n, values[0].shape[1], *constants,
    )  # fmt: skip


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


_launch_fields = Launcher(_gather_fields, n_warps=1)


def gather_fields(places: th.Tensor, env_row: int, batch: FieldBatch) -> None:
    """Fill ``batch`` for the slots in the first row of ``places`` and the environments in row ``env_row``."""
    n, constants = places.shape[1], field_constants(batch)
    _launch_fields(
        batch.rewards.device, (n, 1), (constants, field_type(batch)),
        places, *field_arguments(batch, batch.rewards), env_row, n, *constants,
    )  # fmt: skip
