"""Compiled walks through a sum tree. Import through :func:`sb3_extra_buffers.compiled.load_kernels` only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from sb3_extra_buffers.compressed.sum_tree import FAN_OUT

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@njit(nogil=True, cache=True)
def update(nodes: Floats, bounds: Integers, indices: Integers, values: Floats) -> None:
    """See :meth:`sb3_extra_buffers.compressed.sum_tree.SumTree.__setitem__`."""
    for i in range(indices.shape[0]):
        nodes[indices[i]] = values[i]
    for i in range(indices.shape[0]):
        node = indices[i]
        for level in range(bounds.shape[0] - 2):
            node //= FAN_OUT
            first = bounds[level] + node * FAN_OUT
            total = 0.0
            for child in range(FAN_OUT):
                total += nodes[first + child]
            nodes[bounds[level + 1] + node] = total


@njit(nogil=True, cache=True)
def find(nodes: Floats, bounds: Integers, heights: Floats, found: Integers) -> None:
    """See :meth:`sb3_extra_buffers.compressed.sum_tree.SumTree.find`."""
    for i in range(heights.shape[0]):
        height, node = heights[i], 0
        for level in range(bounds.shape[0] - 2, -1, -1):
            first = bounds[level] + node * FAN_OUT
            total, before, taken = 0.0, 0.0, 0
            for child in range(FAN_OUT):
                value = nodes[first + child]
                if total + value > total:
                    before, taken = total, child
                    total += value
                    if total > height:
                        break
            height = max(height - before, 0.0)
            node = node * FAN_OUT + taken
        found[i] = node


@njit(nogil=True, cache=True)
def find_in(nodes: Floats, bounds: Integers, numbers: Integers, heights: Floats, found: Integers) -> None:
    """:func:`find` for several trees: ``nodes`` is (trees, nodes), and ``numbers`` has the tree of each height."""
    for i in range(heights.shape[0]):
        find(nodes[numbers[i]], bounds, heights[i : i + 1], found[i : i + 1])


@njit(nogil=True, cache=True)
def update_in(nodes: Floats, bounds: Integers, numbers: Integers, indices: Integers, values: Floats) -> None:
    """:func:`update` for several trees, like :func:`find_in`."""
    for i in range(indices.shape[0]):
        update(nodes[numbers[i]], bounds, indices[i : i + 1], values[i : i + 1])


def compile_all() -> None:
    nodes, bounds, indices = np.zeros(16), np.array([0, 16]), np.zeros(1, dtype=np.int64)
    update(nodes, bounds, indices, np.ones(1))
    find(nodes, bounds, np.zeros(1), indices)
    find_in(nodes[None], bounds, indices, np.zeros(1), indices)
    update_in(nodes[None], bounds, indices, indices, np.ones(1))
