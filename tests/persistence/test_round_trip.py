"""Whatever buffer is saved: the one that is loaded is the same, and goes on in the same way."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.utils import LinearSchedule

from sb3_extra_buffers import parallel
from sb3_extra_buffers.codecs import none
from sb3_extra_buffers.compressed import CompressedReplayBuffer, CompressedRolloutBuffer
from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError, SaveError
from sb3_extra_buffers.persistence.container import Container, write
from tests.methods import METHODS
from tests.persistence.buffers import ALL_CLASSES, IMAGES, N_ENVS, RGB, SLOTS, add, draw, goal_env, make, steps_for
from tests.transitions import assert_same

FILLINGS = {"empty": 0, "partly filled": 25, "full": SLOTS, "wrapped": 2 * SLOTS + 11}
BOUNDED = spaces.Box(np.array([0.0, -1.0]), np.array([2.0, 1.0]), dtype=np.float64)
GPU_METHODS = ["none", "rle", "zstd", "delta"]


def check_twins(buffer: BaseCompressedBuffer, twin: Any, transitions: list[Any]) -> None:
    """Both give the same batches now and while more is added to both."""
    assert type(twin) is type(buffer)
    assert_same(draw(twin, 1), draw(buffer, 1))
    for number, transition in enumerate(transitions):
        for one in (buffer, twin):
            add(one, transition, number)
        if number % 8 == 0 or one.full:
            assert_same(draw(twin, number), draw(buffer, number))


def saved_and_loaded(buffer: BaseCompressedBuffer, path: Path, **kwargs: Any) -> Any:
    buffer.save(path)
    env = goal_env() if "Her" in type(buffer).__name__ else None
    return type(buffer).load(path, device="cpu", env=env, **kwargs)


def filled(name: str, count: int, **kwargs: Any) -> tuple[BaseCompressedBuffer, list[Any]]:
    """A buffer after ``count`` steps, and more steps."""
    buffer = make(name, **kwargs)
    transitions = steps_for(buffer, count + SLOTS)
    for number, transition in enumerate(transitions[:count]):
        add(buffer, transition, number)
    return buffer, transitions[count:]


@pytest.mark.parametrize("filling", FILLINGS)
@pytest.mark.parametrize("name", ALL_CLASSES)
def test_every_class(name: str, filling: str, tmp_path: Path) -> None:
    buffer, more = filled(name, FILLINGS[filling])
    twin = saved_and_loaded(buffer, tmp_path / "buffer")
    check_twins(buffer, twin, more)


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str, tmp_path: Path) -> None:
    buffer, more = filled("CompressedReplayBuffer", 3 * SLOTS, compression_method=method)
    twin = saved_and_loaded(buffer, tmp_path / "buffer")
    assert_same(draw(twin, 0), draw(buffer, 0))  # which also prepares what is prepared on first use
    assert twin.memory_usage() == buffer.memory_usage()
    check_twins(buffer, twin, more)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [name for name in ALL_CLASSES if not name.startswith("Gpu")])
def test_every_class_with_every_method(name: str, method: str, tmp_path: Path) -> None:
    buffer, more = filled(name, SLOTS + 9, compression_method=method)
    check_twins(buffer, saved_and_loaded(buffer, tmp_path / "buffer"), more)


@pytest.mark.parametrize("name", [name for name in ALL_CLASSES if name.startswith("Gpu")])
@pytest.mark.parametrize("method", GPU_METHODS)
def test_every_method_on_a_device(name: str, method: str, tmp_path: Path) -> None:
    buffer, more = filled(name, 2 * SLOTS + 11, compression_method=method, buffer_device="cpu")
    check_twins(buffer, saved_and_loaded(buffer, tmp_path / "buffer"), more)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("CompressedReplayBuffer", {"optimize_memory_usage": True, "handle_timeout_termination": False}),
        ("CompressedReplayBuffer", {"dtypes": {"elem_type": np.uint8}, "output_dtype": "float", "frame_stack": 4}),
        ("CompressedReplayBuffer", {"normalize_images": True, "frame_stack": None}),
        ("CompressedReplayBuffer", {"compression_method": "rle", "dtypes": {"runs_type": np.uint16}}),
        ("CompressedReplayBuffer", {"compression_method": "delta", "compression_kwargs": {"frames_per_record": 3}}),
        (
            "CompressedReplayBuffer",
            {
                "space": RGB,
                "frame_stack": 4,
                "compression_kwargs": {"indexed_colour": True},
                "compression_method": "delta",
            },
        ),
        ("CompressedReplayBuffer", {"space": spaces.Discrete(5)}),
        ("CompressedReplayBuffer", {"space": spaces.MultiDiscrete([3, 4])}),
        ("CompressedReplayBuffer", {"space": spaces.MultiBinary((2, 3))}),
        ("CompressedReplayBuffer", {"space": BOUNDED}),
        ("CompressedRolloutBuffer", {"space": spaces.Box(-1, 1, ())}),
        ("CompressedNStepReplayBuffer", {"n_steps": 2, "gamma": 0.7}),
        ("CompressedPrioritizedReplayBuffer", {"n_steps": 2, "beta": LinearSchedule(0.4, 1.0, 0.5)}),
        ("CompressedHerReplayBuffer", {"goal_selection_strategy": "final", "copy_info_dict": True}),
        ("GpuReplayBuffer", {"heap_bytes": 1 << 20}),
    ],
)
def test_options(name: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    buffer, more = filled(name, 2 * SLOTS + 11, **arguments)
    twin = saved_and_loaded(buffer, tmp_path / "buffer")
    assert repr(twin._arguments()) == repr(buffer._arguments())
    check_twins(buffer, twin, more)


def test_priorities(tmp_path: Path) -> None:
    buffer, more = filled("CompressedPrioritizedReplayBuffer", SLOTS)
    rng = np.random.default_rng(0)
    for _ in range(5):
        batch = buffer.sample(16)
        buffer.update_priorities(batch.indices, rng.normal(size=16) * 3)
    twin = saved_and_loaded(buffer, tmp_path / "buffer")
    assert twin.max_priority == buffer.max_priority > 1
    check_twins(buffer, twin, more)


def test_infos_of_her(tmp_path: Path) -> None:
    buffer = make("CompressedHerReplayBuffer", copy_info_dict=True)
    info = {"$": 1, 3: (np.float32(0.1), [np.arange(3)]), "episode": {"r": float("inf")}, "b": b"\0"}
    for transition in steps_for(buffer, 10):
        buffer.add(*transition[:5], [info, {}])
    twin = saved_and_loaded(buffer, tmp_path / "buffer")
    assert str(twin.infos[4].tolist()) == str(buffer.infos[4].tolist())
    assert type(twin.infos[0, 0][3][0]) is np.float32
    buffer.infos[2, 0] = {"env": goal_env()}
    with pytest.raises(SaveError, match=r"infos\['env'\] is of type DummyVecEnv, which only pickle"):
        buffer.save(tmp_path / "buffer")
    assert type(buffer).load(tmp_path / "buffer", "cpu").size() == 10


@pytest.mark.parametrize("name", ["CompressedRolloutBuffer", "CompressedDictRolloutBuffer", "GpuRolloutBuffer"])
def test_a_rollout_that_batches_have_been_taken_from(name: str, tmp_path: Path) -> None:
    buffer, more = filled(name, SLOTS)
    draw(buffer, 0)
    twin = saved_and_loaded(buffer, tmp_path / "buffer")
    assert twin.generator_ready
    check_twins(buffer, twin, more)


@pytest.mark.parametrize("name", ["CompressedReplayBuffer", "CompressedRolloutBuffer"])
def test_a_buffer_that_was_emptied(name: str, tmp_path: Path) -> None:
    buffer, more = filled(name, SLOTS - 2)
    buffer.reset()
    check_twins(buffer, saved_and_loaded(buffer, tmp_path / "buffer"), more)


@pytest.mark.parametrize("method", ["none", "delta", "zstd-dict/3", "rle-jit"])
def test_mapped(method: str, tmp_path: Path) -> None:
    """Large enough for the arena to be mapped, and what is added afterwards leaves the file as it was."""
    space = spaces.Box(0, 255, (2, 64, 64), np.uint8)
    buffer, more = filled("CompressedReplayBuffer", 90, space=space, compression_method=method, frame_stack=None)
    path = tmp_path / "buffer"
    twin = saved_and_loaded(buffer, path, mmap=True)
    before = path.read_bytes()
    check_twins(buffer, twin, more)
    assert path.read_bytes() == before


@pytest.mark.parametrize("mmap", [False, True])
def test_raw_records_of_an_earlier_version(mmap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They had fewer frames, and files did not say how many. Other buffers must be able to read segments of it."""
    space, path = spaces.Box(0, 255, (2, 64, 64), np.uint8), tmp_path / "buffer"
    with monkeypatch.context() as earlier:
        earlier.setattr(none, "_LARGE_FRAMES", 1)
        earlier.setattr(none.NoneCodec, "state", lambda codec: {})
        buffer, more = filled("CompressedReplayBuffer", 90, space=space, compression_method="none", frame_stack=None)
        buffer.save(path)
    twin = CompressedReplayBuffer.load(path, "cpu", mmap=mmap)
    codec = twin._stores[""].codec
    assert codec.frames_per_record < none.NoneCodec(codec.frame).frames_per_record
    other = make("CompressedReplayBuffer", space=space, compression_method="none", frame_stack=None)
    other.ingest_segment(twin.export_segment())
    for name, values in next(twin.to_numpy()).items():
        np.testing.assert_array_equal(next(other.to_numpy())[name], values)
    check_twins(buffer, twin, more)
    twin.check()
    check_twins(buffer, saved_and_loaded(twin, tmp_path / "again"), more)


@pytest.mark.parametrize("name", ["CompressedRolloutBuffer", "CompressedMaskableRolloutBuffer"])
def test_actions_of_a_rollout_that_another_version_of_sb3_made(name: str, tmp_path: Path) -> None:
    """SB3 2.7.0 keeps them as float32, later versions in the dtype of the space."""
    buffer, _ = filled(name, SLOTS)
    actions, dtypes = buffer.actions, {np.dtype(np.float32), buffer.action_space.dtype}
    for dtype in dtypes:
        buffer.actions = actions.astype(dtype)
        loaded = saved_and_loaded(buffer, tmp_path / str(dtype))
        assert loaded.actions.dtype == actions.dtype
        assert_same(loaded.actions, actions)
    buffer.actions = actions.astype(np.float64)
    with pytest.raises(CorruptDataError, match="actions must be"):
        saved_and_loaded(buffer, tmp_path / "other")


def test_a_mapped_buffer_can_be_saved_to_the_file_it_is_mapped_from(tmp_path: Path) -> None:
    space, path = spaces.Box(0, 255, (2, 64, 64), np.uint8), tmp_path / "buffer"
    buffer, more = filled("CompressedReplayBuffer", 90, space=space, compression_method="none", frame_stack=None)
    twin = saved_and_loaded(buffer, path, mmap=True)
    for transition in more:
        for one in (buffer, twin):
            one.add(*transition)
        twin.save(path)
    check_twins(buffer, twin, more)
    check_twins(CompressedReplayBuffer.load(path, "cpu"), twin, [])


@pytest.mark.parametrize("cores", [1, 3])
def test_with_another_number_of_threads(cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, _ = filled("CompressedReplayBuffer", 2 * SLOTS, compression_method="zstd")
    batch = draw(buffer, 5)
    buffer.save(tmp_path / "buffer")
    monkeypatch.setattr(parallel, "core_count", lambda: cores)
    monkeypatch.setattr(parallel, "_MIN_SLICE_BYTES", 1)
    assert_same(draw(CompressedReplayBuffer.load(tmp_path / "buffer", "cpu"), 5), batch)


def test_on_another_device(tmp_path: Path) -> None:
    buffer, _ = filled("CompressedReplayBuffer", SLOTS)
    buffer.save(tmp_path / "buffer")
    loaded = CompressedReplayBuffer.load(tmp_path / "buffer", "meta")
    assert loaded.sample(4).observations.device == th.device("meta")


def test_what_is_saved_can_be_pickled_as_well(tmp_path: Path) -> None:
    buffer, more = filled("CompressedReplayBuffer", 2 * SLOTS)
    twin = pickle.loads(pickle.dumps(saved_and_loaded(buffer, tmp_path / "buffer")))
    check_twins(buffer, twin, more)


class MyBuffer(CompressedReplayBuffer):
    pass


def test_classes(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    filled("CompressedReplayBuffer", 5)[0].save(path)
    assert type(BaseCompressedBuffer.load(path)) is CompressedReplayBuffer
    assert type(MyBuffer.load(path)) is MyBuffer
    MyBuffer(8, IMAGES, spaces.Discrete(2), n_envs=N_ENVS).save(path)
    assert type(CompressedReplayBuffer.load(path)) is CompressedReplayBuffer
    with pytest.raises(
        ConfigurationError, match=r"holds a CompressedReplayBuffer.*use CompressedReplayBuffer.load\(\)"
    ):
        CompressedRolloutBuffer.load(path)


def test_an_environment_with_other_spaces(tmp_path: Path) -> None:
    filled("CompressedReplayBuffer", 5)[0].save(tmp_path / "buffer")
    with pytest.raises(ConfigurationError, match="another environment"):
        CompressedReplayBuffer.load(tmp_path / "buffer", env=goal_env())


def test_progress_is_shown_on_demand(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    buffer, _ = filled("CompressedReplayBuffer", 5)
    buffer.save(tmp_path / "buffer")
    CompressedReplayBuffer.load(tmp_path / "buffer")
    assert capfd.readouterr().err == ""
    buffer.save(tmp_path / "buffer", progress=True)
    CompressedReplayBuffer.load(tmp_path / "buffer", progress=True)
    shown = capfd.readouterr().err
    assert "saving buffer" in shown
    assert "loading buffer" in shown


def test_a_schedule_that_is_a_function_is_refused(tmp_path: Path) -> None:
    buffer = make("CompressedPrioritizedReplayBuffer", beta=lambda progress: 1 - progress / 2)
    with pytest.raises(SaveError, match=r"The buffer\['beta'\] is of type function"):
        buffer.save(tmp_path / "buffer")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["MyBuffer", "BaseCompressedBuffer", "_Recurrent", "import_module", 3])
def test_a_file_can_name_only_public_classes_of_this_library(name: Any, tmp_path: Path) -> None:
    filled("CompressedReplayBuffer", 5)[0].save(tmp_path / "buffer")
    with Container.open(tmp_path / "buffer") as file:
        meta, arrays = file.meta, {array: file.read(array) for array in file.arrays}
    write(tmp_path / "buffer", {**meta, "class": name}, arrays)
    with pytest.raises(CorruptDataError, match="it is of class"):
        BaseCompressedBuffer.load(tmp_path / "buffer")


@pytest.mark.parametrize("name", ["GpuReplayBuffer", "CompressedRecurrentRolloutBuffer"])
def test_a_file_is_loaded_before_the_module_of_its_class_is_imported(name: str, tmp_path: Path) -> None:
    filled(name, 5)[0].save(tmp_path / "buffer")
    code = (
        "import sys; from sb3_extra_buffers.compressed.base import BaseCompressedBuffer as Base;"
        f"assert 'sb3_extra_buffers.gpu_buffers' not in sys.modules;"
        f"assert type(Base.load({str(tmp_path / 'buffer')!r})).__name__ == {name!r}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("shape", [(0,), (4, 0)])
def test_observations_without_elements(shape: tuple[int, ...], tmp_path: Path) -> None:
    space = spaces.Box(0, 255, shape, np.uint8)
    buffer = CompressedReplayBuffer(20, space, spaces.Discrete(3), compression_method="delta")
    nothing = np.zeros((1, *shape), np.uint8)
    buffer.add(nothing, nothing, np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
    for twin in (saved_and_loaded(buffer, tmp_path / "file"), pickle.loads(pickle.dumps(buffer))):
        assert_same(draw(twin, 1), draw(buffer, 1))
