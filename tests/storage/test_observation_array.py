"""An observation array can be indexed as SB3 indexes the NumPy arrays in its place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from stable_baselines3.common.buffers import BaseBuffer

from sb3_extra_buffers.storage.config import StorageConfig
from sb3_extra_buffers.storage.observation_array import ObservationArray
from sb3_extra_buffers.storage.observation_store import ObservationStore

SHAPE = (7, 3, 2, 4)
REFERENCE = np.random.default_rng(0).integers(0, 256, size=SHAPE, dtype=np.uint8)


def array_of(values: np.ndarray, method: str = "gzip") -> ObservationArray:
    config = StorageConfig.from_arguments(method, None, None, None, frame_stack=None)
    array = ObservationArray(ObservationStore(*values.shape[:2], values.shape[2:], values.dtype, config))
    for slot, observations in enumerate(values):
        array[slot] = observations
    return array


def indices(size: int) -> st.SearchStrategy[Any]:
    numbers = st.integers(-size, size - 1)
    return st.one_of(
        numbers,
        numbers.map(np.int64),
        st.slices(size),
        st.lists(numbers, min_size=1, max_size=5),
        st.lists(numbers, min_size=1, max_size=5).map(lambda many: np.array(many, np.int32)),
        st.lists(numbers, min_size=1, max_size=5).map(np.array),
        hnp.arrays(np.bool_, size),
    )


def outcome(function: Any) -> Any:
    try:
        return function()
    except IndexError:
        return IndexError


class TestReading:
    array = array_of(REFERENCE)

    @given(slot=indices(7))
    def test_slots(self, slot: Any) -> None:
        assert np.array_equal(self.array[slot], REFERENCE[slot])

    @given(slot=indices(7), env=indices(3))
    def test_slots_and_environments(self, slot: Any, env: Any) -> None:
        expected = outcome(lambda: REFERENCE[slot, env])
        found = outcome(lambda: self.array[slot, env])
        if expected is IndexError:  # lists of different lengths
            assert found is IndexError
        else:
            assert found.shape == expected.shape
            assert np.array_equal(found, expected)

    @given(data=st.data(), shape=hnp.array_shapes(max_dims=3, max_side=4))
    def test_index_arrays_of_any_shape(self, data: st.DataObject, shape: tuple[int, ...]) -> None:
        slots = data.draw(hnp.arrays(np.int64, shape, elements=st.integers(-7, 6)))
        envs = data.draw(hnp.arrays(np.int64, shape, elements=st.integers(-3, 2)))
        assert np.array_equal(self.array[slots, envs], REFERENCE[slots, envs])
        assert np.array_equal(self.array[slots, envs, :], REFERENCE[slots, envs, :])

    @pytest.mark.parametrize("rest", [(0,), (slice(None), 1), (1, slice(1, 3)), (slice(None), slice(None))], ids=str)
    def test_parts_of_observations(self, rest: tuple[Any, ...]) -> None:
        assert np.array_equal(self.array[(4, 1, *rest)], REFERENCE[(4, 1, *rest)])
        slots, envs = np.array([4, 0, 6]), np.array([1, 2, 0])
        parts = np.stack([REFERENCE[(slot, env, *rest)] for slot, env in zip(slots, envs, strict=True)])
        assert np.array_equal(self.array[(slots, envs, *rest)], parts)

    @given(slot=indices(7), env=indices(3), rest=st.tuples(indices(SHAPE[2]), indices(SHAPE[3])))
    def test_parts_of_observations_are_those_of_numpy_or_refused(
        self, slot: Any, env: Any, rest: tuple[Any, Any]
    ) -> None:
        for key in ((slot, env, rest[0]), (slot, env, *rest)):
            found = outcome(lambda key=key: self.array[key])
            if found is not IndexError:
                assert np.shape(found) == np.shape(REFERENCE[key])
                assert np.array_equal(found, REFERENCE[key])

    @pytest.mark.parametrize(
        "key", [7, -8, (0, 3), ([0, 9], 0), (np.array([7]), np.array([0])), (np.array([0]), np.array([-4]))], ids=str
    )
    def test_beyond_the_end(self, key: Any) -> None:
        with pytest.raises(IndexError):
            self.array[key]

    def test_a_single_observation_without_axes(self) -> None:
        values = np.arange(21.0).reshape(7, 3)
        array = array_of(values, "none")
        assert array[4, 1] == values[4, 1]
        assert array[4].tolist() == values[4].tolist()

    def test_looks_like_the_array_it_stands_for(self) -> None:
        assert (self.array.shape, self.array.dtype, self.array.ndim) == (SHAPE, np.uint8, 4)
        assert (len(self.array), self.array.nbytes) == (7, REFERENCE.nbytes)
        assert np.array_equal(np.asarray(self.array), REFERENCE)
        assert np.asarray(self.array, dtype=np.float32).dtype == np.float32

    def test_cannot_be_seen_without_a_copy(self) -> None:
        with pytest.raises(ValueError, match="copy"):
            self.array.__array__(copy=False)


class TestWriting:
    @given(slot=indices(7), env=indices(3))
    def test_what_is_written_is_read(self, slot: Any, env: Any) -> None:
        array, reference = array_of(REFERENCE, "none"), REFERENCE.copy()
        if outcome(lambda: reference[slot, env]) is IndexError:
            return
        values = 255 - reference[slot, env]
        array[slot, env] = values
        reference[slot, env] = values
        assert np.array_equal(array[:], reference)

    def test_one_observation_may_fill_many_places(self) -> None:
        array, reference = array_of(REFERENCE, "none"), REFERENCE.copy()
        array[2:5] = reference[0, 0]
        reference[2:5] = reference[0, 0]
        assert np.array_equal(array[:], reference)

    @pytest.mark.parametrize("values", [7, REFERENCE[0, :1], REFERENCE[0, 0]], ids=["number", "one row", "no row"])
    def test_what_numpy_broadcasts_fills_a_slot(self, values: Any) -> None:
        array, reference = array_of(REFERENCE, "none"), REFERENCE.copy()
        array[3] = values
        reference[3] = values
        assert np.array_equal(array[:], reference)


def test_a_shifted_column_stands_for_the_next_slots() -> None:
    store = array_of(REFERENCE).store
    shifted = ObservationArray(store, shift=1)
    assert np.array_equal(shifted[:], np.roll(REFERENCE, -1, axis=0))
    shifted[6, 1] = REFERENCE[3, 2]
    assert np.array_equal(ObservationArray(store)[0, 1], REFERENCE[3, 2])


class TestFlattened:
    """What SB3 makes of a rollout before it cuts it into batches."""

    flat = BaseBuffer.swap_and_flatten(array_of(REFERENCE))
    expected = BaseBuffer.swap_and_flatten(REFERENCE)

    @given(key=indices(21))
    def test_reads_like_an_array(self, key: Any) -> None:
        assert np.array_equal(self.flat[key], self.expected[key])

    def test_looks_like_an_array(self) -> None:
        assert (self.flat.shape, self.flat.dtype, len(self.flat)) == ((21, 2, 4), np.uint8, 21)
        assert np.array_equal(np.asarray(self.flat), self.expected)
        with pytest.raises(ValueError, match="copy"):
            self.flat.__array__(copy=False)

    def test_other_shapes_are_refused(self) -> None:
        with pytest.raises(ValueError, match="axes 0 and 1"):
            array_of(REFERENCE).swapaxes(1, 2)
        with pytest.raises(ValueError, match="reshaped"):
            array_of(REFERENCE).swapaxes(0, 1).reshape(21, 8)
