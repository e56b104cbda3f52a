"""``CompressedArray`` reads and writes like an array of observations, and keeps them small."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.compressed import CompressedArray
from sb3_extra_buffers.errors import ConfigurationError, ObservationError
from sb3_extra_buffers.storage import observation_index
from tests.methods import METHODS, installed

FRAMES = np.random.default_rng(0).integers(0, 2, size=(40, 6, 8), dtype=np.uint8).cumsum(axis=2, dtype=np.uint8)


def filled(shape: tuple[int, ...], **options: Any) -> tuple[CompressedArray, np.ndarray]:
    array = CompressedArray(shape, np.uint8, (6, 8), **options)
    reference = np.zeros((*shape, 6, 8), np.uint8)
    for slot in range(shape[0]):
        reference[slot] = FRAMES[slot : slot + 3].reshape(3, 6, 8)[: shape[1]] if len(shape) == 2 else FRAMES[slot]
        array[slot] = reference[slot]
    return array, reference


def check_same(array: CompressedArray, reference: np.ndarray) -> None:
    found = array.to_numpy()
    assert (found.dtype, found.shape) == (reference.dtype, reference.shape)
    assert np.array_equal(found, reference)


class TestReading:
    keys_of_slots = (0, -1, np.int64(3), slice(2, 9, 3), slice(None), [1, 1, -2], np.array([[0, 4], [5, 1]]))

    @pytest.mark.parametrize("key", [*keys_of_slots, ..., np.arange(20) % 3 == 0, (4, 2), (4, slice(2), 3)], ids=str)
    def test_of_one_environment(self, key: Any) -> None:
        array, reference = filled((20,))
        assert np.array_equal(array[key], reference[key])

    @pytest.mark.parametrize(
        "key",
        [
            *keys_of_slots,
            *((slot, env) for slot in keys_of_slots[:-1] for env in (0, -1, slice(1, None))),
            (np.array([3, 5, 7]), np.array([0, 2, 1])),
            (np.array([3, 5], np.int32), np.array([0, 2], np.uint8)),
            (np.array([3, 5, 7]), 1),
            (np.array([[3], [5]]), np.array([0, 2])),
            (np.array([3, 5]), np.array([True, False, True])),
            (2, 1, 4),
            (2, 1, slice(None), 3),
            (np.array([3, 5, 7]), np.array([0, 2, 1]), slice(None)),
            (slice(None), 2, slice(None), slice(1, 3)),
        ],
        ids=str,
    )
    def test_of_several_environments(self, key: Any) -> None:
        array, reference = filled((20, 3))
        assert np.array_equal(array[key], reference[key])

    def test_is_what_was_never_written_as_zeros(self) -> None:
        array = CompressedArray((4, 2), np.float64, 3)
        assert not array[:].any()
        assert array[:].shape == (4, 2, 3)

    def test_in_a_loop(self) -> None:
        array, reference = filled((20,))
        assert np.array_equal(np.stack(list(array)), reference)
        assert len(array) == 20

    @pytest.mark.parametrize("key", [20, -21, (0, 3), (np.array([0, 20]), np.array([0, 0]))], ids=str)
    def test_beyond_the_end(self, key: Any) -> None:
        with pytest.raises(IndexError):
            filled((20, 3))[0][key]

    def test_gives_arrays_that_belong_to_the_caller(self) -> None:
        array, reference = filled((20,))
        array[3][:] = 99
        array[:][:] = 99
        check_same(array, reference)


class TestWriting:
    @pytest.mark.parametrize("key", [3, slice(2, 9), [1, 5], np.array([7, 0]), np.arange(20) > 16, ...], ids=str)
    def test_to_one_environment(self, key: Any) -> None:
        array, reference = filled((20,))
        for values in (FRAMES[30], reference[key][..., ::-1, :] + 1):
            array[key] = values
            reference[key] = values
            check_same(array, reference)

    @pytest.mark.parametrize(
        "key",
        [3, -1, (2, 1), (slice(4), 0), (np.array([7, 0]), np.array([1, 2])), (5, slice(None), slice(None))],
        ids=str,
    )
    def test_to_several_environments(self, key: Any) -> None:
        array, reference = filled((20, 3))
        values = reference[key][..., ::-1, :] + 1
        array[key] = values
        reference[key] = values
        check_same(array, reference)

    def test_to_a_part_of_an_observation_is_refused(self) -> None:
        array, reference = filled((20, 3))
        with pytest.raises(IndexError, match="whole"):
            array[2, 1, 0] = 5
        check_same(array, reference)

    def test_what_does_not_fit_is_refused(self) -> None:
        array, reference = filled((20, 3))
        with pytest.raises(ObservationError, match=r"\(3, 6, 8\)"):
            array[2] = np.zeros((3, 6, 7), np.uint8)
        with pytest.raises(ObservationError, match="float64"):
            array[2] = np.full((3, 6, 8), 0.5)
        check_same(array, reference)


@pytest.mark.parametrize("method", installed("rle", "zstd", "delta"))
def test_overwriting_in_any_order_is_exact_and_takes_no_more_and_more_memory(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observation_index, "_WORTH_COMPACTING", 1 << 17)
    array = CompressedArray((60, 3), np.uint8, (6, 8), compression_method=method)
    reference = np.zeros((60, 3, 6, 8), np.uint8)
    rng = np.random.default_rng(0)
    sizes = []
    for step in range(6000):
        # Some slots and environments are written far more often than others, which never move on.
        slot, env = min(int(rng.exponential(10)), 59), min(int(rng.exponential(0.5)), 2)
        frame = FRAMES[rng.integers(40)] + np.uint8(step % 7)
        array[slot, env] = frame
        reference[slot, env] = frame
        sizes.append(array.nbytes)
    check_same(array, reference)
    assert max(sizes) < 300_000


def test_it_is_smaller_than_what_it_holds() -> None:
    array = CompressedArray((1000,), np.uint8, (50, 50), compression_method="rle")
    for slot in range(1000):
        array[slot] = np.full((50, 50), slot % 200, np.uint8)
    assert array.nbytes < 1000 * 100
    check_same(array, np.broadcast_to((np.arange(1000) % 200).astype(np.uint8)[:, None, None], (1000, 50, 50)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda array: pickle.loads(pickle.dumps(array))])
def test_a_copy_has_a_life_of_its_own(duplicate: Any, method: str) -> None:
    array, reference = filled((20, 3), compression_method=method)
    other = duplicate(array)
    assert type(other) is CompressedArray
    array[4] = FRAMES[20:23]
    check_same(other, reference)
    for slot in range(20):
        other[slot, 1] = FRAMES[slot + 10]
        reference[slot, 1] = FRAMES[slot + 10]
    check_same(other, reference)


class TestAsAnArray:
    def test_it_is_one_of_objects(self) -> None:
        array = CompressedArray((1_000_000, 4), np.uint8, (84, 84))
        assert isinstance(array, np.ndarray)
        assert (array.shape, array.dtype, array.ndim, array.size) == ((1_000_000, 4), object, 2, 4_000_000)

    @pytest.mark.parametrize(
        "compute", [lambda array: array + 1, lambda array: np.stack([array]), lambda array: np.mean(array)]
    )
    def test_it_does_not_compute_with_what_it_cannot_see(self, compute: Any) -> None:
        with pytest.raises(TypeError):
            compute(filled((20,))[0])

    def test_a_view_says_that_it_holds_nothing(self) -> None:
        with pytest.raises(TypeError, match="to_numpy"):
            filled((20,))[0].T[0]

    def test_repr_names_shape_and_method(self) -> None:
        text = repr(filled((20, 3), compression_method="gzip5")[0])
        assert "(20, 3)" in text
        assert "gzip5" in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"shape": (2, 3, 4)}, r"\(2, 3, 4\)"),
        ({"shape": (0,)}, r"\(0,\)"),
        ({"obs_shape": (3, -1)}, r"\(3, -1\)"),
        ({"buffer": b"12345678"}, "buffer"),
        ({"strides": (8,)}, "strides"),
        ({"offset": 8}, "offset"),
        ({"compression_method": "zip"}, "zip"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        CompressedArray(**{"shape": (5,), "dtype": np.uint8, "obs_shape": (3,), **arguments})
