"""Batches are drawn as SB3 draws them: the same numbers, and the same state of NumPy's generator afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from sb3_extra_buffers.codecs.availability import has_numba
from sb3_extra_buffers.gpu_buffers.replay_buffer import _draw

HIGHS = [1, 2, 3, 4, 5, 255, 256, 257, 49_999, 1 << 20, (1 << 31) + 1, (1 << 32) - 1, 1 << 32, 1 << 40]


@pytest.fixture(autouse=True)
def _state() -> object:
    before = np.random.get_state()
    yield
    np.random.set_state(before)


@pytest.mark.parametrize("high", HIGHS)
def test_same_numbers_and_state(high: int) -> None:
    for seed, n in [(0, 32), (1, 1), (2, 0), (3, 1000)]:
        np.random.seed(seed)
        np.random.normal(size=3)  # leaves a number for later, which must stay
        np.random.randint(0, 9, size=600 + seed)
        state = np.random.get_state()
        expected = [np.random.randint(0, high, size=n) for _ in range(3)], np.random.normal(size=3)
        np.random.set_state(state)
        found = [_draw(high, n) for _ in range(3)], np.random.normal(size=3)
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])
        assert found[0][0].dtype == expected[0][0].dtype


def test_nothing_to_draw_from() -> None:
    with pytest.raises(ValueError, match="high"):
        _draw(0, 3)


@pytest.mark.skipif(not hasattr(np.random, "set_bit_generator"), reason="NumPy has one generator only")
def test_another_generator() -> None:
    before = np.random.get_bit_generator()
    try:
        for generator in (np.random.PCG64, np.random.MT19937):
            found = []
            for draw in (lambda high, n: np.random.randint(0, high, size=n), _draw):
                np.random.set_bit_generator(generator(7))
                found.append([draw(1000, 40), draw(5, 40)])
            np.testing.assert_array_equal(*found)
    finally:
        np.random.set_bit_generator(before)


def test_compiled() -> None:
    """The draw does not silently become NumPy's."""
    from sb3_extra_buffers.compiled import load_kernels

    assert (load_kernels("sb3_extra_buffers.gpu_buffers.draws") is not None) == has_numba()
