"""Checksums of observations, for ``verify=True``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.errors import CorruptDataError

Digests = npt.NDArray[np.uint64]

UNKNOWN = 0
"""The checksum of an observation that was stored without one."""


def digests_of(observations: npt.NDArray[Any]) -> Digests:
    """The checksum of each of ``observations``: xxh3 of its bytes."""
    shape = len(observations), math.prod(observations.shape[1:])  # not -1, which is ambiguous for an empty batch
    rows = np.ascontiguousarray(observations).reshape(shape).view(np.uint8)
    # Not 0, which means UNKNOWN.
    return np.array([xxhash.xxh3_64_intdigest(row.data) or 1 for row in rows], dtype=np.uint64)


class ObservationDigests:
    """A checksum of each observation of a store: computed when it is stored, and compared when it is read."""

    def __init__(
        self,
        n_columns: int,
        n_slots: int,
        n_envs: int,
        make_zeros: Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]] = np.zeros,
    ) -> None:
        self.columns: list[Digests] = [make_zeros((n_slots, n_envs), np.dtype(np.uint64)) for _ in range(n_columns)]

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns)

    def compare(self, column: int, slots: Indices, envs: Indices, observations: npt.NDArray[Any]) -> None:
        """Raise an error if one of ``observations``, read from these places, differs from what was stored there."""
        expected = self.columns[column][slots, envs]
        differs = (digests_of(observations) != expected) & (expected != UNKNOWN)
        if differs.any():
            first = int(differs.argmax())
            raise CorruptDataError(
                f"{int(differs.sum())} of {len(slots)} observations are not what was stored: the first is in slot "
                f"{slots[first]} of environment {envs[first]}. Its memory or file was damaged, or this is a bug."
            )

    def state(self) -> dict[str, Digests]:
        return {str(column): digests for column, digests in enumerate(self.columns)}

    def clear(self, n_slots: int) -> None:
        """Forget the checksums of the first ``n_slots`` slots."""
        for column in self.columns:
            column[:n_slots] = UNKNOWN
