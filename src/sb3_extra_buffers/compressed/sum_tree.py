"""Sample indices in proportion to their priorities, and update priorities, both in logarithmic time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.state import SavedState, State

FAN_OUT = 16
"""Children of a node: two cache lines, so a tree over a million priorities is five levels deep."""


class SumTree:
    """``size`` priorities, all 0 at first, and a tree of their sums.

    Every node is the sum of its children from left to right, recomputed whenever one of them changes. So rounding
    errors do not accumulate, and the compiled code computes exactly the same sums as the NumPy code, its reference.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        lengths = [_padded(size)]
        while lengths[-1] > FAN_OUT:
            lengths.append(_padded(lengths[-1] // FAN_OUT))
        self._bounds = np.cumsum([0, *lengths], dtype=np.int64)
        """Where each level begins in ``_nodes``, the priorities first, the children of the root last."""
        self._nodes: npt.NDArray[np.float64] = np.zeros(self._bounds[-1])

    @property
    def total(self) -> float:
        return float(self._nodes[self._bounds[-2] :].cumsum()[-1])

    @property
    def nbytes(self) -> int:
        return self._nodes.nbytes

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = self._nodes[: self.size][indices]
        return found

    def __setitem__(self, indices: npt.NDArray[np.int64], priorities: npt.ArrayLike) -> None:
        if len(indices) == 0:
            return
        if indices.min() < 0 or indices.max() >= self.size:
            raise IndexError(f"There are {self.size} priorities, but indices from {indices.min()} to {indices.max()}.")
        kernels = _kernels()
        if kernels is not None:
            values = np.ascontiguousarray(np.broadcast_to(priorities, indices.shape), dtype=np.float64)
            kernels.update(self._nodes, self._bounds, np.ascontiguousarray(indices, dtype=np.int64), values)
            return
        levels = self._levels()
        levels[0][indices] = priorities
        for level, above in pairwise(levels):
            indices = indices // FAN_OUT
            above[indices] = level.reshape(-1, FAN_OUT)[indices].cumsum(axis=1)[:, -1]

    def find(self, heights: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """For each height in [0, total), find the index whose range of the cumulative sum contains it.

        It is never an index of priority 0.
        """
        nodes: npt.NDArray[np.int64] = np.zeros(len(heights), dtype=np.int64)
        kernels = _kernels()
        if kernels is not None:
            kernels.find(self._nodes, self._bounds, heights, nodes)
            return nodes
        rows = np.arange(len(heights))
        for level in reversed(self._levels()):
            sums = level.reshape(-1, FAN_OUT)[nodes].cumsum(axis=1)
            beyond = sums > heights[:, None]
            # If rounding puts a height past the end, take the last child with a priority above 0.
            child = np.where(beyond[:, -1], beyond.argmax(axis=1), sums.argmax(axis=1))
            heights = np.maximum(heights - np.where(child > 0, sums[rows, child - 1], 0.0), 0.0)
            nodes = nodes * FAN_OUT + child
        return nodes

    def clear(self) -> None:
        self._nodes[:] = 0.0

    def state(self) -> State:
        """The priorities. All sums follow from them."""
        return {"priorities": self._nodes[: self.size]}

    def restore(self, state: SavedState) -> None:
        priorities = state.array("priorities", np.float64, (self.size,))
        if not (np.isfinite(priorities) & (priorities >= 0)).all():
            raise state.error("priorities", "must be numbers, and none below 0")
        self[np.flatnonzero(priorities)] = priorities[priorities > 0]

    def _levels(self) -> list[npt.NDArray[np.float64]]:
        return [self._nodes[low:high] for low, high in pairwise(self._bounds)]


class JoinedTrees:
    """Several trees of the same size as one tree: their totals are one more level of sums.

    The nodes of all trees move into one array. Each tree can still be used on its own.
    """

    def __init__(self, trees: Sequence[SumTree]) -> None:
        self._trees, self._bounds = trees, trees[0]._bounds
        self._nodes: npt.NDArray[np.float64] = np.zeros((len(trees), trees[0]._bounds[-1]))
        for tree, nodes in zip(trees, self._nodes, strict=True):
            used = np.flatnonzero(tree._nodes)  # writing zeros would make fresh memory resident
            nodes[used] = tree._nodes[used]
            tree._nodes = nodes

    @property
    def totals(self) -> npt.NDArray[np.float64]:
        totals: npt.NDArray[np.float64] = self._nodes[:, self._bounds[-2] :].cumsum(axis=1)[:, -1]
        return totals

    def get(self, numbers: npt.NDArray[np.int64], indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = self._nodes[numbers, indices]
        return found

    def set(self, numbers: npt.NDArray[np.int64], indices: npt.NDArray[np.int64], values: npt.ArrayLike) -> None:
        """Set priorities. Numbers and indices are not checked."""
        priorities = np.ascontiguousarray(np.broadcast_to(values, indices.shape), dtype=np.float64)
        kernels = _kernels()
        if kernels is not None:
            kernels.update_in(self._nodes, self._bounds, numbers, indices, priorities)
            return
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            self._trees[number][indices[mine]] = priorities[mine]

    def find(self, heights: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """For each height in [0, sum of totals), find the number of its tree, and its index there."""
        totals = self.totals
        ends = totals.cumsum()
        # If rounding puts a height past the end, take the last tree with a priority above 0.
        numbers = np.minimum(np.searchsorted(ends, heights, side="right"), np.flatnonzero(totals)[-1])
        inside = heights - (ends - totals)[numbers]
        found: npt.NDArray[np.int64] = np.zeros(len(heights), dtype=np.int64)
        kernels = _kernels()
        if kernels is not None:
            kernels.find_in(self._nodes, self._bounds, numbers, inside, found)
            return numbers, found
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            found[mine] = self._trees[number].find(inside[mine])
        return numbers, found


def _padded(length: int) -> int:
    return -(-length // FAN_OUT) * FAN_OUT


def _kernels() -> ModuleType | None:
    return load_kernels("sb3_extra_buffers.compressed.sum_tree_kernels")
