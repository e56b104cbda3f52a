"""The histories cover every registered class and method, and the names that they patch exist."""

from __future__ import annotations

import importlib
import itertools

import pytest

import sb3_extra_buffers.compressed as compressed
import sb3_extra_buffers.gpu_buffers as gpu_buffers
from sb3_extra_buffers.codecs.registry import METHODS
from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from tests.histories.models import model_class
from tests.histories.plans import DEVICE_METHODS, HOST_METHODS, Name, draw_plan, worlds_of
from tests.histories.short import BUFFERS, short_histories, visits_of
from tests.histories.soak import main, names, run
from tests.histories.surroundings import SMALL
from tests.histories.visits import KINDS


def test_every_class_of_the_library_has_histories_and_a_model() -> None:
    public = {name for package in (compressed, gpu_buffers) for name in dir(package)} | set(compressed._FROM_CONTRIB)
    classes = {name for name in public if name.endswith("Buffer") and not name.startswith("Base")}
    for name in classes:
        cls = getattr(compressed, name, None) or getattr(gpu_buffers, name)
        assert issubclass(cls, BaseCompressedBuffer)
    assert classes == set(BUFFERS)
    assert all(map(model_class, BUFFERS))


@pytest.mark.parametrize("buffer", BUFFERS)
def test_every_method_has_a_history_with_every_class(buffer: str) -> None:
    methods = {name.method for name in short_histories(buffer)}
    assert methods == set(DEVICE_METHODS if buffer.startswith("Gpu") else HOST_METHODS)


def test_every_installed_method_is_one_of_them() -> None:
    assert set(METHODS) | {"auto"} >= set(HOST_METHODS) >= {"none", "rle", "gzip", "delta", "auto"}


def test_every_kind_of_visit_is_asked_for() -> None:
    assert set(KINDS) == set(itertools.chain.from_iterable(map(visits_of, BUFFERS)))


def test_constants_that_are_made_small_are_there() -> None:
    for module_name, constants in SMALL.items():
        module = importlib.import_module(f"sb3_extra_buffers.{module_name}")
        for name, value in constants.items():
            assert value < getattr(module, name)


def test_options_are_drawn_in_all_their_variants() -> None:
    plans = [draw_plan(name) for name in map(Name.parse, itertools.islice(names(0), 3000))]
    options = {key for plan in plans for key, value in {**plan.options, **plan.shared_options}.items() if value}
    assert options >= {
        "compression_method", "compression_kwargs", "frame_stack", "normalize_images", "output_dtype",
        "optimize_memory_usage", "handle_timeout_termination", "n_steps", "copy_info_dict", "verify",
    }  # fmt: skip
    assert {plan.path for plan in plans} >= {"host", "arrays", "tensors"}
    for attribute in ("on_disk", "shrunk", "writes_by_index"):
        assert {getattr(plan, attribute) for plan in plans} == {True, False}
    assert {plan.name.world for plan in plans} >= set(itertools.chain.from_iterable(map(worlds_of, BUFFERS)))


class TestNames:
    def test_say_everything(self) -> None:
        name = Name("CompressedReplayBuffer", "zstd-dict", "stack, channels last", 700, 3)
        assert Name.parse(str(name)) == name
        assert draw_plan(name) == draw_plan(Name.parse(str(name)))

    @pytest.mark.parametrize("text", ["", "CompressedReplayBuffer:delta", "Nothing:delta:stack:3:1", "a:b:c:d:e"])
    def test_that_make_no_sense(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"named buffer:method|There is no buffer class"):
            Name.parse(text)


class TestSoak:
    def test_repeats_a_history(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--repeat", "CompressedReplayBuffer:none:Discrete:100:0"]) == 0
        assert "the same as SB3's" in capsys.readouterr().out

    def test_says_how_to_repeat_a_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from sb3_extra_buffers.storage.base_store import BaseStore

        monkeypatch.setattr(BaseStore, "read", lambda self, wanted, *_: [0] * len(wanted))
        outcome = run("CompressedReplayBuffer:none:Discrete:100:0")
        assert outcome.error is not None
        assert "--repeat 'CompressedReplayBuffer:none:Discrete:100:0'" in outcome.error

    def test_other_seeds_are_other_histories(self) -> None:
        one, other = (list(itertools.islice(names(seed), 50)) for seed in (1, 2))
        assert not set(one) & set(other)
        assert one == list(itertools.islice(names(1), 50))
