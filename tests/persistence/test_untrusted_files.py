"""Forged files: all their checksums are right, but their contents are not.

Loading one is an error of this library, or gives a buffer that can be used. What must not happen is anything else:
compiled code trusts its indices.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from sb3_extra_buffers.errors import CorruptDataError, ExtraBuffersError
from sb3_extra_buffers.persistence.container import Container, write
from tests.persistence.buffers import RGB, SLOTS, add, draw, make, steps_for

State = tuple[dict[str, Any], dict[str, np.ndarray]]
KINDS = {
    "delta": (
        "CompressedReplayBuffer",
        {"compression_method": "delta", "frame_stack": 4, "compression_kwargs": {"frames_per_record": 4}},
    ),
    "none": ("CompressedRolloutBuffer", {"compression_method": "none", "frame_stack": None}),
    "rle-jit": ("CompressedReplayBuffer", {"compression_method": "rle-jit"}),
    "zstd-dict": ("CompressedReplayBuffer", {"compression_method": "zstd-dict/3", "frame_stack": 4}),
    "indexed": (
        "CompressedReplayBuffer",
        {"space": RGB, "frame_stack": 4, "compression_method": "delta", "compression_kwargs": {"indexed_colour": True}},
    ),
    "prioritized": ("CompressedPrioritizedReplayBuffer", {}),
    "sequences": ("CompressedPrioritizedSequenceReplayBuffer", {}),
    "device": ("GpuReplayBuffer", {"compression_method": "delta"}),
    "device, rle": ("GpuReplayBuffer", {"compression_method": "rle"}),
}


def filled(kind: str) -> tuple[BaseCompressedBuffer, Any]:
    name, arguments = KINDS[kind]
    buffer = make(name, **arguments)
    transitions = steps_for(buffer, 2 * SLOTS + 9)
    for number, transition in enumerate(transitions):
        add(buffer, transition, number)
    return buffer, transitions[-1]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A file of each kind, made once, with a step that could be added to what is in it."""
    folder, made = tmp_path_factory.mktemp("files"), {}

    def get(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            buffer, step = filled(kind)
            buffer.save(folder / kind)
            made[kind] = folder / kind, step
        return made[kind]

    return get


def contents(path: Path) -> State:
    with Container.open(path) as file:
        return copy.deepcopy(file.meta), {name: file.read(name).copy() for name in file.arrays}


def use(path: Path, step: Any, mmap: bool = False) -> None:
    """Load and use a buffer, which may fail in the ways that files may fail in."""
    # ValueError and the like are what NumPy says to values that fit together only in part.
    with contextlib.suppress(ExtraBuffersError, ValueError, IndexError, OverflowError):
        buffer: Any = BaseCompressedBuffer.load(path, "cpu", mmap=mmap)
        draw(buffer, 0)
        for number in range(17):
            add(buffer, step, number)
        draw(buffer, 1)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("kind", KINDS)
def test_index_arrays_with_anything_in_them(
    kind: str, files: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    path, step = files(kind)
    rng = np.random.default_rng(0)
    meta, arrays = contents(path)
    for name, array in arrays.items():
        if array.dtype.kind not in "iu" or not array.size:
            continue
        for value in (-1, 2**31 - 1, 2**63 - 1, int(rng.integers(0, 10_000))):
            changed = array.copy()
            place = tuple(rng.integers(0, size) for size in array.shape)
            changed[place] = np.array(value % 2**64, dtype=np.uint64).astype(array.dtype)
            write(tmp_path / "changed", meta, {**arrays, name: changed})
            use(tmp_path / "changed", step)
            changed[...] = changed[place]
            write(tmp_path / "changed", meta, {**arrays, name: changed})
            use(tmp_path / "changed", step)


@pytest.mark.parametrize(
    "more", [{"storage": "mmap", "path": "elsewhere"}, {"device": "meta"}], ids=["another place", "another device"]
)
def test_arguments_that_are_not_a_files_to_choose(
    more: dict[str, str], files: Callable[[str], tuple[Path, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    meta, arrays = contents(files("delta")[0])
    meta["arguments"] |= more
    write(tmp_path / "changed", meta, arrays)
    with pytest.raises(CorruptDataError, match="no saved buffer has the arguments"):
        BaseCompressedBuffer.load(tmp_path / "changed", "cpu")
    assert [entry.name for entry in tmp_path.iterdir()] == ["changed"]


@pytest.mark.parametrize("value", [None, "0.9", [], True, {"$float": "nan"}])
def test_numbers_that_are_none(value: Any, files: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> None:
    meta, arrays = contents(files("prioritized")[0])
    meta["arguments"]["gamma"] = value
    write(tmp_path / "changed", meta, arrays)
    with pytest.raises(CorruptDataError, match=r"gamma is .*, not a number"):
        BaseCompressedBuffer.load(tmp_path / "changed", "cpu")


@pytest.mark.parametrize("name", ["n_envs", "n_steps"])
def test_numbers_that_would_take_all_memory(
    name: str, files: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    meta, arrays = contents(files("delta")[0])
    meta["arguments"][name] = 100_000_000
    write(tmp_path / "changed", meta, arrays)
    with pytest.raises(CorruptDataError, match=f"{name} is 100000000, more than"):
        BaseCompressedBuffer.load(tmp_path / "changed", "cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory means something else elsewhere")
@pytest.mark.parametrize("kind", ["delta", "prioritized"])
def test_a_buffer_size_that_the_file_does_not_have_takes_no_memory(
    kind: str, files: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    pytest.importorskip("psutil")
    from sb3_extra_buffers.measure.memory import settled_rss
    from tests.persistence.memory_probe import peak_of

    meta, arrays = contents(files(kind)[0])
    meta["arguments"]["buffer_size"] = 50_000_000
    write(tmp_path / "changed", meta, arrays)
    before = settled_rss()

    def load() -> None:
        with pytest.raises(CorruptDataError, match="actions must be"):
            BaseCompressedBuffer.load(tmp_path / "changed", "cpu")

    assert peak_of(load) - before < 100_000_000


def test_values_that_are_nested_without_end(files: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> None:
    meta, arrays = contents(files("delta")[0])
    nested: Any = []
    for _ in range(900):
        nested = [nested]
    meta["arguments"]["gamma"] = nested
    write(tmp_path / "changed", meta, arrays)
    with pytest.raises(CorruptDataError, match="is corrupt"):
        BaseCompressedBuffer.load(tmp_path / "changed", "cpu")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("starts", lambda array: array + 10**9),
        ("starts", lambda array: array - 10**9),
        ("lengths", lambda array: array + np.uint32(10**6)),
        ("references", lambda array: array + np.uint32(1000)),
        ("heads", lambda array: array - 1000),
        ("heads", lambda array: array + 10**9),
        ("encoded", lambda array: array + 1),
        ("first_records", lambda array: array - 10**6),
        ("starts", lambda array: array[:, :1]),
        ("starts", lambda array: array.astype(np.int32)),
        ("waiting", lambda array: array[:-1]),
        ("codec/frames", lambda array: array[:1]),
        ("codec/current", lambda array: array + 10**6),
    ],
)
def test_an_index_that_leads_astray_is_refused(
    name: str, change: Any, files: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    path, _ = files("delta")
    meta, arrays = contents(path)
    name = f"stores//frames/{name}"
    write(tmp_path / "changed", meta, {**arrays, name: change(arrays[name])})
    with pytest.raises(CorruptDataError, match="is corrupt"):
        BaseCompressedBuffer.load(tmp_path / "changed", "cpu")


@pytest.mark.parametrize(
    "change", [lambda ends: ends + 10**6, lambda ends: ends // 4, lambda ends: np.full_like(ends, 3)]
)
def test_observations_that_lead_astray_are_refused(
    change: Any, files: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    path, _ = files("delta")
    meta, arrays = contents(path)
    changed = change(arrays["stores//ends/0"]).astype(np.uint32)
    write(tmp_path / "changed", meta, {**arrays, "stores//ends/0": changed})
    with pytest.raises(CorruptDataError, match="needs frames before number"):
        BaseCompressedBuffer.load(tmp_path / "changed", "cpu")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "$tuple", "$space", "$array", "$dtype"]), children, max_size=2)
    ),
    max_leaves=5,
)


def leaves(tree: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [way, *(leaf for key, value in items for leaf in leaves(value, (*way, key)))]


@pytest.mark.parametrize("kind", ["delta", "zstd-dict", "prioritized", "device"])
@given(data=st.data())
def test_any_value_replaced_by_any_other(
    kind: str, files: Callable[[str], tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path, step = files(kind)
    meta, arrays = contents(path)
    *way, last = data.draw(st.sampled_from(leaves(meta)[1:]))
    node = meta
    for key in way:
        node = node[key]
    node[last] = data.draw(JSON.filter(lambda value: "nan" not in repr(value) and "inf" not in repr(value)))
    if last in ("buffer_size", "n_envs") and isinstance(node[last], int):
        node[last] %= 1000
    changed = tmp_path_factory.getbasetemp() / "changed"
    write(changed, meta, arrays)
    use(changed, step)


@given(data=st.data())
def test_any_bytes_replaced_by_any_others(
    files: Callable[[str], tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path, step = files("delta")
    content = bytearray(path.read_bytes())
    start = data.draw(st.integers(0, len(content)))
    content[start : start + data.draw(st.integers(0, 200))] = data.draw(st.binary(max_size=200))
    changed = tmp_path_factory.getbasetemp() / "changed"
    changed.write_bytes(content)
    use(changed, step)
    use(changed, step, mmap=True)


def test_payload_that_does_not_decode(files: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for kind in KINDS:
        path, step = files(kind)
        meta, arrays = contents(path)
        for name in arrays:
            if name.endswith("arena/bytes"):
                arrays[name] = rng.integers(0, 256, size=arrays[name].shape, dtype=np.uint8)
        write(tmp_path / "changed", meta, arrays)
        use(tmp_path / "changed", step)


@pytest.mark.parametrize(
    ("name", "value"),
    [("unbroken", 10**6), ("unbroken", -1), ("n_added", 10**6), ("episode_steps", 10**6)],
)
def test_a_buffer_of_few_steps_that_claims_to_have_many(name: str, value: int, tmp_path: Path) -> None:
    """The next step would let sequences begin at steps that are not in the buffer."""
    buffer = make("CompressedSequenceReplayBuffer", length=4, at_episode_end="cross")
    transitions = steps_for(buffer, 4)
    for number, transition in enumerate(transitions[:3]):
        add(buffer, transition, number)
    buffer.save(tmp_path / "saved")
    meta, arrays = contents(tmp_path / "saved")
    if name == "n_added":
        meta["state"]["sequences"]["n_added"] = value
    else:
        path = {"unbroken": "sequences/unbroken", "episode_steps": "fields/episode_steps"}[name]
        arrays[path] = np.full_like(arrays[path], value)
    write(tmp_path / "changed", meta, arrays)
    with pytest.raises(CorruptDataError, match=name):
        BaseCompressedBuffer.load(tmp_path / "changed", "cpu")
    BaseCompressedBuffer.load(tmp_path / "saved", "cpu").check()


@pytest.mark.parametrize("value", [0, -1.0, None, "1"])
def test_a_largest_priority_that_is_none(value: Any, files: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> None:
    meta, arrays = contents(files("prioritized")[0])
    meta["state"]["max_priority"] = value
    write(tmp_path / "changed", meta, arrays)
    with pytest.raises(CorruptDataError, match="max_priority"):
        BaseCompressedBuffer.load(tmp_path / "changed", "cpu")
