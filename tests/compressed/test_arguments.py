"""Constructors: SB3's positional arguments, our options by keyword, all of them visible, misspelt ones refused."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from gymnasium import spaces
from sb3_contrib.common.maskable.buffers import MaskableRolloutBuffer
from sb3_contrib.common.recurrent.buffers import RecurrentRolloutBuffer
from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer
from stable_baselines3.her import HerReplayBuffer

from sb3_extra_buffers.compressed import (
    BaseCompressedBuffer,
    CompressedHerReplayBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
)
from sb3_extra_buffers.compressed.arguments import StorageOptions
from sb3_extra_buffers.errors import ArgumentError, ConfigurationError
from sb3_extra_buffers.gpu_buffers import GpuReplayBuffer
from tests.persistence.buffers import ALL_CLASSES, class_named, make

VECTOR, ACTIONS = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)
COMMON = {
    "compression_method": "auto",
    "dtypes": None,
    "compression_kwargs": None,
    "decompression_kwargs": None,
    "normalize_images": False,
    "output_dtype": "raw",
    "frame_stack": "auto",
    "storage": "memory",
    "path": None,
    "verify": False,
}
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def role_of(name: str) -> type:
    roles = {
        "Her": HerReplayBuffer,
        "Recurrent": RecurrentRolloutBuffer,
        "Maskable": MaskableRolloutBuffer,
        "Rollout": RolloutBuffer,
        "Replay": ReplayBuffer,
    }
    return next(role for word, role in roles.items() if word in name)


def positional(cls: type) -> dict[str, Any]:
    parameters = inspect.signature(cls).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind in POSITIONAL}


@pytest.mark.parametrize("name", ALL_CLASSES)
class TestEveryClass:
    def test_has_the_positional_arguments_of_sb3s(self, name: str) -> None:
        ours, theirs = positional(class_named(name)), positional(role_of(name))
        assert list(ours.items()) == list(theirs.items())

    def test_shows_its_options_by_keyword_only(self, name: str) -> None:
        parameters = inspect.signature(class_named(name)).parameters
        options = {name: found for name, found in parameters.items() if found.kind not in POSITIONAL}
        assert {found.kind for found in options.values()} == {inspect.Parameter.KEYWORD_ONLY}
        assert COMMON.items() <= {name: found.default for name, found in options.items()}.items()
        assert all(found.annotation is not inspect.Parameter.empty for found in parameters.values())

    def test_takes_no_more_positional_arguments_than_sb3s(self, name: str) -> None:
        cls = class_named(name)
        with pytest.raises(TypeError, match=rf"positional arguments? but {len(positional(cls)) + 2} were given"):
            cls(*positional(cls), {"elem_type": np.uint8})

    def test_refuses_an_option_that_it_does_not_have(self, name: str) -> None:
        with pytest.raises(ArgumentError) as raised:
            make(name, compresion_method="rle")
        message = str(raised.value)
        assert message.startswith(
            f"{name}() got an unexpected keyword argument 'compresion_method'. Did you mean 'compression_method'? "
        )
        for option in inspect.signature(class_named(name)).parameters.keys() - {"buffer_size", "n_envs", "device"}:
            assert option in message or option.endswith("_space")
        assert isinstance(raised.value, TypeError)
        assert isinstance(raised.value, ConfigurationError)

    def test_remembers_verify(self, name: str) -> None:
        assert [make(name).verify, make(name, verify=True).verify] == [False, True]
        assert make(name, verify=True)._arguments()["verify"] is True


def test_what_type_checkers_are_told_is_what_constructors_take() -> None:
    cls = BaseCompressedBuffer
    parameters = inspect.signature(cls.__init__).parameters
    hints = get_type_hints(StorageOptions)
    own = {name for name, found in parameters.items() if found.kind is inspect.Parameter.KEYWORD_ONLY}
    inherited = set(COMMON)
    assert hints.keys() == own | inherited
    taken = get_type_hints(cls.__init__)
    assert {name: taken[name] for name in own} == {name: hints[name] for name in own}


def test_sb3s_classes_still_know_their_subclasses() -> None:
    """``abc`` keeps what it was asked while a class is being made in the cache of that class's parent."""
    for name in ALL_CLASSES:
        for base in class_named(name).__mro__:
            assert issubclass(base, base)
            assert issubclass(class_named(name), base)


def test_dtypes_in_the_place_where_version_0_5_had_them() -> None:
    with pytest.raises(TypeError, match="positional"):
        CompressedReplayBuffer(10, VECTOR, ACTIONS, "cpu", 1, False, True, {"elem_type": np.float32})  # type: ignore[misc]


class PopsItsOwn(CompressedRolloutBuffer):
    """A user's class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.mine = kwargs.pop("mine", None)
        super().__init__(*args, **kwargs)


class WritesItsOwn(CompressedReplayBuffer):
    def __init__(self, size: int, space: spaces.Space, *, note: str = "", **options: Any) -> None:
        self.note = note
        super().__init__(size, space, ACTIONS, **options)


class HasOneFirst(CompressedReplayBuffer):
    def __init__(self, note: str = "", *args: Any, **kwargs: Any) -> None:
        self.note = note
        super().__init__(*args, **kwargs)


class TestClassesOfUsers:
    def test_may_take_options_of_their_own(self) -> None:
        assert PopsItsOwn(10, VECTOR, ACTIONS, "cpu", mine=3, gamma=0.5).mine == 3
        assert WritesItsOwn(10, VECTOR, note="x", device="cpu", verify=True).note == "x"
        assert HasOneFirst("x", 10, VECTOR, ACTIONS, "cpu").note == "x"

    def test_show_ours_too(self) -> None:
        assert {"buffer_size", "gamma", *COMMON} <= inspect.signature(PopsItsOwn).parameters.keys()
        assert {"note", *COMMON} <= inspect.signature(WritesItsOwn).parameters.keys()
        assert "note" in inspect.signature(HasOneFirst).parameters

    def test_are_named_when_they_pass_on_an_unknown_option(self) -> None:
        with pytest.raises(ArgumentError, match=r"^WritesItsOwn\(\) got .* 'verfy'\. Did you mean 'verify'\?"):
            WritesItsOwn(10, VECTOR, verfy=True)


def test_no_suggestion_where_nothing_is_similar() -> None:
    with pytest.raises(ArgumentError, match=r"^GpuReplayBuffer\(\) got .* 'xyzzy'\. Its options are "):
        GpuReplayBuffer(10, VECTOR, ACTIONS, "cpu", xyzzy=1)  # type: ignore[call-arg]


def test_her_on_disk_has_everything_back(tmp_path: Path) -> None:
    """SB3 creates some of its arrays after all of our constructors but one."""
    buffer = make("CompressedHerReplayBuffer", storage="mmap", path=tmp_path)
    buffer.ep_length[3] = 7
    buffer.close()
    again = make("CompressedHerReplayBuffer", storage="mmap", path=tmp_path)
    assert isinstance(again, CompressedHerReplayBuffer)
    assert (again.ep_length[3] == 7).all()
    again.close()


class Older(CompressedReplayBuffer):
    """Writes what a version without ``verify`` wrote."""

    def _arguments(self) -> dict[str, Any]:
        arguments = super()._arguments()
        del arguments["verify"]
        return arguments


def test_a_folder_of_a_version_that_did_not_know_an_option(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"device": "cpu", "storage": "mmap", "path": tmp_path}
    transition: Any = np.ones((1, 3)), np.ones((1, 3)), np.ones((1, 1)), np.ones(1), np.zeros(1), [{}]
    with Older(10, VECTOR, ACTIONS, **arguments) as buffer:
        buffer.add(*transition)
    other = CompressedReplayBuffer(10, VECTOR, ACTIONS, **arguments, verify=True)
    with pytest.raises(ConfigurationError, match="made with other arguments: verify"):
        other.add(*transition)
    with CompressedReplayBuffer(10, VECTOR, ACTIONS, **arguments) as buffer:
        assert buffer.size() == 1
