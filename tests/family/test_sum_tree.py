"""The sum tree against sums over all priorities, and its compiled code against its NumPy code."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sb3_extra_buffers.codecs.availability import has_numba
from sb3_extra_buffers.compressed import sum_tree
from sb3_extra_buffers.compressed.sum_tree import SumTree

SIZES = [1, 2, 15, 16, 17, 255, 256, 257, 5000]
VALUES = st.sampled_from([0.0, 1.0, 1e-300, 1e-6, 1 / 3, 7.0, 1e30])


@pytest.fixture(params=["numpy", pytest.param("numba", marks=pytest.mark.skipif(not has_numba(), reason="no numba"))])
def _code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "numpy":
        monkeypatch.setattr(sum_tree, "load_kernels", lambda module: None)
    return None


@pytest.mark.usefixtures("_code")
@pytest.mark.parametrize("size", SIZES)
def test_like_sums_over_everything(size: int) -> None:
    rng = np.random.default_rng(size)
    tree, priorities = SumTree(size), np.zeros(size)
    assert tree.total == 0
    for _ in range(10):
        indices = rng.integers(0, size, size=rng.integers(1, 40))
        priorities[indices] = values = np.where(rng.random(len(indices)) < 0.3, 0, rng.random(len(indices)))
        values = priorities[indices]  # of indices that are repeated, the last value counts
        tree[indices] = values
        np.testing.assert_array_equal(tree[np.arange(size)], priorities)
        assert tree.total == pytest.approx(priorities.sum(), rel=1e-12)
        if priorities.any():
            heights = rng.random(100) * tree.total
            expected = np.searchsorted(priorities.cumsum(), heights, side="right")
            np.testing.assert_array_equal(tree.find(heights), expected)


@pytest.mark.usefixtures("_code")
@pytest.mark.parametrize("size", SIZES)
def test_never_without_priority(size: int) -> None:
    tree = SumTree(size)
    only = size // 2
    tree[np.array([only])] = 0.1
    heights = np.array([0.0, np.nextafter(tree.total, 0), tree.total, 2 * tree.total])
    assert tree.find(heights).tolist() == [only] * 4


@pytest.mark.usefixtures("_code")
def test_one_value_for_all_and_nothing_for_none() -> None:
    tree = SumTree(40)
    tree[np.arange(3, 9)] = 2.0
    tree[np.arange(0)] = 1.0
    assert tree.total == 12
    assert tree.find(np.empty(0)).shape == (0,)
    tree.clear()
    assert tree.total == 0


@pytest.mark.usefixtures("_code")
@pytest.mark.parametrize("index", [-1, 20, 31])
def test_out_of_range(index: int) -> None:
    tree = SumTree(20)
    with pytest.raises(IndexError, match="20 priorities"):
        tree[np.array([3, index])] = 1.0
    assert tree.total == 0


@pytest.mark.skipif(not has_numba(), reason="no numba")
@given(
    size=st.integers(1, 600),
    updates=st.lists(st.lists(st.tuples(st.integers(0, 599), VALUES), min_size=1), min_size=1, max_size=5),
    heights=st.lists(st.floats(0, 1), max_size=20),
)
def test_compiled_code_does_the_same(size: int, updates: list[list[tuple[int, float]]], heights: list[float]) -> None:
    compiled, plain = SumTree(size), SumTree(size)
    for update in updates:
        values = {index % size: value for index, value in update}
        for tree, load in ((compiled, sum_tree.load_kernels), (plain, lambda module: None)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sum_tree, "load_kernels", load)
                tree[np.array(list(values))] = np.array(list(values.values()))
    assert compiled._nodes.tobytes() == plain._nodes.tobytes()
    at = np.array(heights) * plain.total
    found = compiled.find(at)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sum_tree, "load_kernels", lambda module: None)
        np.testing.assert_array_equal(found, plain.find(at))
