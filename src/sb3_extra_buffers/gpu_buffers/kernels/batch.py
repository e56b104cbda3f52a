"""What a launch needs beside the frames: where the observations of a batch are, and the fields that come along."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch as th


class FieldBatch(NamedTuple):
    """Fields to be gathered by the launch that rebuilds observations. Everything is seen as words of 4 bytes."""

    fields: th.Tensor
    """``int32``, (slots, words in a row)."""
    actions: th.Tensor
    rewards: th.Tensor
    dones: th.Tensor
    constants: tuple[int, ...]
    """Words in a row; words in an action, and the next power of two; where actions, rewards, dones, timeouts begin."""


class ObservationBatch(NamedTuple):
    """Observations of one or two columns, and the tensors that they go to."""

    places: th.Tensor
    """``int64``: the slots for each column, and the environments."""
    ends: list[th.Tensor]
    """For each column, ``int32`` (slots, environments): the frame after an observation's last one."""
    outs: Sequence[th.Tensor]
    """For each column, ``uint8``, (n, bytes of an observation)."""
    fields: FieldBatch | None = None


def field_arguments(fields: FieldBatch | None, anything: th.Tensor) -> tuple[th.Tensor, ...]:
    """The tensors that kernels take; without fields, something in their place."""
    return (anything, anything, anything, anything) if fields is None else fields[:4]


def field_constants(fields: FieldBatch | None) -> tuple[int, ...]:
    return _NO_FIELDS if fields is None else fields.constants


def field_type(fields: FieldBatch | None) -> th.dtype | None:
    """What a kernel is compiled for beside the constants."""
    return None if fields is None else fields.actions.dtype


_NO_FIELDS = (0, 0, 0, 0, 0, 0, 0)
