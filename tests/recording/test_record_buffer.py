"""A record buffer against a plain list of the steps that were added."""

from __future__ import annotations

import json
import pickle
import signal
import zipfile
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sb3_extra_buffers import recording
from sb3_extra_buffers.codecs.registry import available_methods
from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError, ObservationError
from sb3_extra_buffers.recording import (
    BaseRecordBuffer,
    DummyRecordBuffer,
    FramelessRecordBuffer,
    RecordBuffer,
)
from sb3_extra_buffers.recording.utils import force_alloc_mem

DTYPES = (np.uint8, np.bool_, np.int16, np.float16, np.float32, np.float64)
LAYOUTS = ("height, width, channels", "channels, height, width", "height, width")


@dataclass
class Steps:
    """An endless game in which most of the picture does not change."""

    res: tuple[int, int] = (6, 5)
    ch_num: int = 3
    dtype: Any = np.uint8
    seed: int = 0
    added: list[tuple[np.ndarray, float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.picture = self._noise((self.ch_num, *self.res))

    def next(self) -> tuple[np.ndarray, float, int]:
        if self.rng.random() < 0.8:
            self.picture = self.picture.copy()
            self.picture[self.rng.integers(self.ch_num)] = self._noise(self.res)
        self.added.append((self.picture, float(self.rng.integers(100)), int(self.rng.integers(20))))
        return self.added[-1]

    def _noise(self, shape: tuple[int, ...]) -> np.ndarray:
        if np.dtype(self.dtype).kind == "f":
            noise = self.rng.normal(size=shape).astype(self.dtype)
            noise.reshape(-1)[:2] = np.nan, -0.0
            return noise
        return self.rng.integers(0, 2 if self.dtype is np.bool_ else 200, shape).astype(self.dtype)


def filled(n: int, size: int = 10, **kwargs: Any) -> tuple[RecordBuffer, Steps]:
    steps = Steps()
    buffer = RecordBuffer(steps.res, steps.ch_num, size, **kwargs)
    for _ in range(n):
        buffer.add(*steps.next())
    return buffer, steps


def laid_out(frame: np.ndarray, layout: str) -> np.ndarray:
    """A frame, channels first, as an environment may give it."""
    if layout == "height, width" and len(frame) == 1:
        return frame[0]
    return frame if layout == "channels, height, width" else np.ascontiguousarray(frame.transpose(1, 2, 0))


def assert_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert np.ascontiguousarray(actual).tobytes() == np.ascontiguousarray(expected).tobytes()


@given(
    size=st.sampled_from([1, 2, 7, 40]),
    n=st.integers(0, 130),
    ch_num=st.sampled_from([1, 3, 4]),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    method=st.sampled_from(["auto", *available_methods()]),
    has_features=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_it_is_the_newest_steps_of_a_list(
    size: int, n: int, ch_num: int, dtype: Any, layout: str, method: str, has_features: bool, seed: int
) -> None:
    steps = Steps(ch_num=ch_num, dtype=dtype, seed=seed)
    dtypes = [dtype, np.float32, *([np.int16, np.float64] if has_features else [])]
    buffer = RecordBuffer(steps.res, ch_num, size, dtypes, compression_method=method)
    for step in range(n):
        frame, reward, action = steps.next()
        buffer.add(laid_out(frame, layout), reward, action, (step, step / 3) if has_features else None)
        assert len(buffer) == min(step + 1, size)
        assert_bits(buffer[-1].frame, frame)

    kept = steps.added[-size:]
    first = n - len(kept)
    assert len(buffer) == len(kept)
    for number, (record, (frame, reward, action)) in enumerate(zip(buffer, kept, strict=True), start=first):
        assert_bits(record.frame, frame)
        assert (record.reward, record.action) == (reward, action)
        assert record.features is None or record.features.tolist() == (number, number / 3)
        assert_bits(buffer.frames[number % size], frame)
        assert buffer.rewards[number % size] == reward
        assert buffer.actions[number % size] == action

    everything = buffer.to_numpy()
    assert_bits(everything.frames, np.array([frame for frame, _, _ in kept], dtype).reshape(-1, ch_num, *steps.res))
    assert everything.rewards.tolist() == [reward for _, reward, _ in kept]
    assert everything.actions.tolist() == [action for _, _, action in kept]
    by_slot = np.zeros(buffer.frames.shape, dtype)
    for number, (frame, _, _) in enumerate(kept, start=first):
        by_slot[number % size] = frame
    assert_bits(np.asarray(buffer.frames), by_slot)


@given(
    st.one_of(
        hnp.basic_indices((10, 3, 6, 5), allow_newaxis=False, allow_ellipsis=False, min_dims=0),
        hnp.integer_array_indices((10,)),
        hnp.arrays(bool, 10),
    )
)
def test_frames_are_indexed_as_an_array_is(key: Any) -> None:
    buffer, _ = filled(13)
    expected = np.asarray(buffer.frames)[key]
    actual = buffer.frames[key]
    assert_bits(np.asarray(actual), np.asarray(expected))


def test_frames_have_the_properties_of_an_array() -> None:
    buffer, _ = filled(13)
    array = np.array(buffer.frames)
    assert (buffer.frames.shape, buffer.frames.ndim, buffer.frames.nbytes) == (array.shape, 4, array.nbytes)
    assert len(buffer.frames) == 10
    assert (array == buffer.frames).all()
    np.testing.assert_array_equal(np.stack(list(buffer.frames)), array)
    assert np.mean(buffer.frames) == array.mean()
    buffer.frames[2:4] = array[5]
    np.testing.assert_array_equal(buffer.frames[3], array[5])
    with pytest.raises(IndexError, match="stored whole"):
        buffer.frames[0, 1] = 0
    with pytest.raises(IndexError):
        buffer.frames[10]
    for key in (([0, 1], [0, 1]), (0, ..., 1), (None, 0), np.ones((10, 3), bool)):
        with pytest.raises(IndexError):
            buffer.frames[key]
    with pytest.raises(ValueError, match="without a copy"):
        buffer.frames.__array__(copy=False)


def test_records_do_not_change_with_the_buffer() -> None:
    buffer, steps = filled(1, size=1, action_shape=())
    record = buffer[0]
    buffer.add(*steps.next())
    frame, reward, action = steps.added[0]
    assert_bits(record.frame, frame)
    assert (record.reward, record.action) == (reward, action)


def test_actions_of_any_shape() -> None:
    buffer = RecordBuffer((2, 2), 1, size=3, action_shape=(2,), action_dtype=np.float32)
    for step in range(4):
        buffer.add(np.zeros((2, 2), np.uint8), np.array([step]), np.array([step, 0.5]))
    assert buffer.actions.tolist() == [[3, 0.5], [1, 0.5], [2, 0.5]]
    assert buffer[0].action.tolist() == [1, 0.5]


def test_a_default_buffer_takes_little_memory_and_compresses() -> None:
    buffer = RecordBuffer()
    frame = np.zeros((240, 320, 3), np.uint8)
    for step in range(100):
        frame[step] = step
        buffer.add(frame, 0, 0)
    assert buffer.frames.shape == (40_000, 3, 240, 320)
    assert buffer.nbytes < 100 * frame.nbytes / 3
    assert "100 of 40,000 steps" in repr(buffer)


def test_reset_forgets_everything() -> None:
    buffer, steps = filled(13)
    buffer.reset()
    assert len(buffer) == 0
    assert not np.asarray(buffer.frames).any()
    assert not buffer.rewards.any()
    buffer.add(*steps.next())
    assert_bits(buffer[0].frame, steps.added[-1][0])


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (np.zeros((5, 6, 3), np.uint8), "Expected a frame of shape"),
        (np.zeros((6, 5), np.uint8), "Expected a frame of shape"),
        (np.full((6, 5, 3), 256), "would change"),
        (np.full((6, 5, 3), 0.5), "would change"),
        (np.full((6, 5, 3), np.nan), "would change"),
    ],
)
def test_a_frame_that_does_not_fit_is_an_error_and_changes_nothing(frame: np.ndarray, message: str) -> None:
    buffer, steps = filled(3)
    with pytest.raises(ObservationError, match=message):
        buffer.add(frame, 0, 0)
    assert len(buffer) == 3
    assert_bits(buffer[-1].frame, steps.added[-1][0])


def test_other_mistakes_are_errors() -> None:
    frame = np.zeros((6, 5, 3), np.uint8)
    plain, with_features = RecordBuffer((6, 5), size=2), RecordBuffer((6, 5), size=2, dtypes=[None, None, int])
    assert with_features.dtypes == (np.uint8, np.float32, int)
    with pytest.raises(ObservationError, match="action"):
        plain.add(frame, 0, 0.5)
    with pytest.raises(ObservationError, match="one reward"):
        plain.add(frame, [0, 1], 0)
    with pytest.raises(ObservationError, match="0 features"):
        plain.add(frame, 0, 0, (1,))
    with pytest.raises(ObservationError, match="1 features"):
        with_features.add(frame, 0, 0)
    with pytest.raises(ConfigurationError, match="at least 1"):
        RecordBuffer(size=0)
    with pytest.raises(ConfigurationError, match="no-such"):
        RecordBuffer(compression_method="no-such")
    with pytest.raises(IndexError):
        plain[0]


def test_a_buffer_without_frames_keeps_the_rest() -> None:
    buffer = FramelessRecordBuffer((6, 5), size=3, dtypes=[np.uint8, np.float32, np.int8])
    for step in range(5):
        buffer.add(None, step, step, (step,))
    assert [(float(record.reward), int(record.action)) for record in buffer] == [(2, 2), (3, 3), (4, 4)]
    assert buffer.frames.shape == (3, 3, 6, 5)
    assert not buffer[0].frame.any()
    assert buffer.features is not None
    assert buffer.features["0"].tolist() == [3, 4, 2]
    assert buffer.nbytes < 100
    assert repr(buffer) == "FramelessRecordBuffer(3 of 3 steps, no frames)"


def test_a_dummy_accepts_everything_and_keeps_nothing() -> None:
    buffer = DummyRecordBuffer((6, 5), 3, size=10)
    buffer.add("frame", None, "action", features=object())
    assert isinstance(buffer, BaseRecordBuffer)
    assert len(buffer) == len(buffer.frames) == len(buffer.rewards) == 0
    assert list(buffer) == []
    with pytest.raises(IndexError):
        buffer[0]


def test_memory_can_be_asked_for_before_it_is_needed() -> None:
    buffer, steps = filled(3)
    force_alloc_mem(buffer, 7)
    assert buffer.rewards.tolist() == [reward for _, reward, _ in steps.added] + [7] * 7
    assert len(buffer) == 3
    force_alloc_mem(DummyRecordBuffer())


@pytest.mark.parametrize("n", [0, 3, 150])
def test_a_buffer_survives_saving_and_pickling(tmp_path: Any, n: int) -> None:
    buffer = RecordBuffer((6, 5), size=70, dtypes=[np.float32, np.float64, np.int16, np.dtype(("f4", (2,)))])
    steps = Steps(dtype=np.float32)
    for step in range(n):
        buffer.add(*steps.next(), (step, (step, 0.5)))
    buffer.save(tmp_path / "steps.npz")
    for other in (RecordBuffer.load(tmp_path / "steps.npz"), pickle.loads(pickle.dumps(buffer))):
        assert len(other) == len(buffer)
        for one, two in zip(other.to_numpy(), buffer.to_numpy(), strict=True):
            assert_bits(one, two)
        other.add(*steps.next(), (1, (2, 3)))
        assert_bits(other[-1].frame, steps.added[-1][0])
    assert [path.name for path in tmp_path.iterdir()] == ["steps.npz"]


def test_loading_with_another_size_or_without_frames(tmp_path: Any) -> None:
    buffer, steps = filled(13)
    buffer.save(tmp_path / "steps")
    fewer = RecordBuffer.load(tmp_path / "steps", size=4, compression_method="gzip1")
    assert [float(record.reward) for record in fewer] == [reward for _, reward, _ in steps.added[-4:]]
    assert "gzip" in fewer.frames.store.label
    frameless = FramelessRecordBuffer.load(tmp_path / "steps")
    assert [record.action for record in frameless] == [action for _, _, action in steps.added[-10:]]
    frameless.save(tmp_path / "frameless")
    assert len(FramelessRecordBuffer.load(tmp_path / "frameless")) == 10
    with pytest.raises(ConfigurationError, match="no frames"):
        RecordBuffer.load(tmp_path / "frameless")


def test_a_broken_file_is_an_error(tmp_path: Any) -> None:
    (tmp_path / "text").write_text("no recording")
    with pytest.raises(CorruptDataError, match="not a complete recording"):
        RecordBuffer.load(tmp_path / "text")


@pytest.mark.parametrize("change", [{"res": 5}, {"frame_dtype": "nothing"}, {"ch_num": "three"}])
def test_settings_that_make_no_sense_are_an_error(change: dict[str, Any], tmp_path: Any) -> None:
    RecordBuffer((6, 5), 1, 4).save(tmp_path / "whole")
    with zipfile.ZipFile(tmp_path / "whole") as whole, zipfile.ZipFile(tmp_path / "changed", "w") as changed:
        for name in whole.namelist():
            content = whole.read(name)
            changed.writestr(name, json.dumps(json.loads(content) | change) if name == "meta.json" else content)
    with pytest.raises(CorruptDataError, match="not a complete recording"):
        RecordBuffer.load(tmp_path / "changed")


@pytest.mark.parametrize(("dtype", "feature"), [(np.int16, 1.7), (np.uint8, 300), ("U3", "long")])
def test_a_feature_that_would_change_is_an_error(dtype: Any, feature: Any) -> None:
    buffer = RecordBuffer((6, 5), 1, 4, dtypes=[None, None, np.float32, dtype])
    with pytest.raises(ObservationError, match=r"The feature 1 of dtype .* would change"):
        buffer.add(np.zeros((6, 5), np.uint8), 0, 0, [0.1, feature])
    assert len(buffer) == 0


def test_a_damaged_file_is_an_error(tmp_path: Any) -> None:
    buffer = RecordBuffer((6, 5), 1, 4, dtypes=[None, None, np.int32])
    for step in range(6):
        buffer.add(np.full((6, 5), step, np.uint8), step, step, [step])
    buffer.save(tmp_path / "recording")
    content = (tmp_path / "recording").read_bytes()
    for place in range(0, len(content), 7):
        (tmp_path / "damaged").write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        try:
            loaded = RecordBuffer.load(tmp_path / "damaged")
        except (CorruptDataError, ConfigurationError):
            continue
        assert loaded.to_numpy().rewards.tolist() == buffer.to_numpy().rewards.tolist()


@pytest.mark.parametrize("problem", ["a wrong feature", "Ctrl-C"])
def test_a_step_that_fails_leaves_the_oldest_one_whole(problem: str) -> None:
    buffer = RecordBuffer((6, 5), 1, 4, dtypes=[None, None, np.int32])

    def add(step: int, feature: Any) -> None:
        buffer.add(np.full((6, 5), step, np.uint8), step, step, [feature])

    for step in range(4):
        add(step, step)
    if problem == "Ctrl-C":
        write_frame = buffer._write_frame

        def interrupted(*arguments: Any) -> None:
            write_frame(*arguments)
            signal.raise_signal(signal.SIGINT)

        buffer._write_frame = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            add(4, 4)
    else:
        with pytest.raises(ValueError, match="invalid literal"):
            add(4, "four")
    for record in buffer:
        assert record.frame.max() == record.reward == record.action == record.features.item()[0]


def test_exported_names() -> None:
    assert sorted(recording.__all__) == recording.__all__
    assert {"RecordBuffer", "FramelessRecordBuffer", "DummyRecordBuffer", "BaseRecordBuffer"} <= set(recording.__all__)
    assert all(hasattr(recording, name) for name in recording.__all__)
