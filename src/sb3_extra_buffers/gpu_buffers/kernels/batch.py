"""What a launch needs beside the frames: where the observations of a batch are, and the fields that come along."""

from __future__ import annotations

from typing import NamedTuple

import torch as th


class FieldBatch(NamedTuple):
    """Fields to be gathered by the launch that rebuilds observations. Everything is seen as words of 4 bytes."""

    fields: th.Tensor
    """``int32``, (slots, words in a row)."""
    actions: th.Tensor
    rewards: th.Tensor
    dones: th.Tensor
    row_words: int
    action_words: int
    actions_at: int
    rewards_at: int
    dones_at: int
    timeouts_at: int


class ObservationBatch(NamedTuple):
    """Observations of one or two columns, and the tensors that they go to."""

    places: th.Tensor
    """``int64``: the slots for each column, and the environments."""
    ends: list[th.Tensor]
    """For each column, ``int32`` (slots, environments): the frame after an observation's last one."""
    outs: list[th.Tensor]
    """For each column, ``uint8``, (n, bytes of an observation)."""
    fields: FieldBatch | None = None
