"""The names that users import, and what importing them costs."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import sb3_extra_buffers
import sb3_extra_buffers.compressed as compressed
import sb3_extra_buffers.gpu_buffers as gpu_buffers
from sb3_extra_buffers import errors

COMPRESSED = {
    "BaseCompressedBuffer",
    "CompressedArray",
    "CompressedDictNStepReplayBuffer",
    "CompressedDictPrioritizedReplayBuffer",
    "CompressedDictPrioritizedSequenceReplayBuffer",
    "CompressedDictReplayBuffer",
    "CompressedDictRolloutBuffer",
    "CompressedDictSequenceReplayBuffer",
    "CompressedHerReplayBuffer",
    "CompressedNStepReplayBuffer",
    "CompressedPrioritizedReplayBuffer",
    "CompressedPrioritizedSequenceReplayBuffer",
    "CompressedReplayBuffer",
    "CompressedRolloutBuffer",
    "CompressedSequenceReplayBuffer",
    "DummyCls",
    "HAS_IGZIP",
    "HAS_LZ4",
    "HAS_NUMBA",
    "HAS_ZSTD",
    "PrioritizedDQN",
    "PrioritizedReplayBufferSamples",
    "PrioritizedSequenceReplayBufferSamples",
    "SequenceReplayBufferSamples",
    "find_buffer_dtypes",
    "find_smallest_dtype",
    "has_igzip",
    "has_lz4",
    "has_numba",
    "has_zstd",
    "init_jit",
}


def test_the_names_of_compressed() -> None:
    assert set(compressed.__all__) == COMPRESSED
    assert all(hasattr(compressed, name) for name in COMPRESSED)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("compressed.base", ["BaseCompressedBuffer", "DummyCls"]),
        ("compressed.compressed_array", ["CompressedArray"]),
        ("compressed.replay_buffer", ["CompressedReplayBuffer", "CompressedDictReplayBuffer"]),
        ("compressed.rollout_buffer", ["CompressedRolloutBuffer", "CompressedDictRolloutBuffer"]),
        ("compressed.compression_methods", ["COMPRESSION_METHOD_MAP", "has_numba", "HAS_NUMBA"]),
        ("compressed.compression_methods.compression_methods_numba", ["init_jit"]),
    ],
)
def test_the_paths_of_the_older_library(module: str, names: list[str]) -> None:
    imported = importlib.import_module(f"sb3_extra_buffers.{module}")
    for name in names:
        assert getattr(imported, name) is getattr(compressed, name, getattr(imported, name))


def test_every_error_is_one_of_the_library_and_one_that_users_expect() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert len(classes) > 5
    for error in classes:
        assert issubclass(error, errors.ExtraBuffersError)
        assert error is errors.ExtraBuffersError or issubclass(error, ValueError | ImportError | OSError | RuntimeError)
        assert error.__name__ in (errors.__doc__ or "")


def test_importing_brings_no_optional_package_and_changes_nothing() -> None:
    code = """
import logging, sys, warnings
import stable_baselines3
before, handlers = set(sys.modules), list(logging.root.handlers)
warnings.simplefilter("error")
import sb3_extra_buffers.compressed
import sb3_extra_buffers.compressed.compression_methods.compression_methods_numba
assert logging.root.handlers == handlers
assert [type(handler) for handler in logging.getLogger("sb3_extra_buffers").handlers] == [logging.NullHandler]
brought = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(brought & {"numba", "llvmlite", "zstandard", "lz4", "isal", "triton"}))
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert finished.stdout.split() == []
    assert finished.stderr == ""


def test_the_common_classes_are_importable_from_the_top() -> None:
    names = {name for name in dir(compressed) if name.endswith("Buffer") and "Base" not in name} | {"PrioritizedDQN"}
    contrib = {name for name in names if "Maskable" in name or "Recurrent" in name}
    expected = names - contrib | {name for name in dir(gpu_buffers) if name.endswith("Buffer") and "Base" not in name}
    assert set(sb3_extra_buffers.__all__) == expected
    for name in expected:
        home = gpu_buffers if name.startswith("Gpu") else compressed
        assert getattr(sb3_extra_buffers, name) is getattr(home, name)
        assert name in dir(sb3_extra_buffers)
    with pytest.raises(AttributeError, match="no attribute 'NoSuchBuffer'"):
        sb3_extra_buffers.NoSuchBuffer  # noqa: B018


def test_type_checkers_see_the_same_names_at_the_top() -> None:
    tree = ast.parse(Path(sb3_extra_buffers.__file__).read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {alias.name for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported == set(sb3_extra_buffers.__all__)


def test_importing_the_package_alone_imports_neither_torch_nor_sb3() -> None:
    code = "import sys, sb3_extra_buffers; print(*{'torch', 'stable_baselines3', 'numpy'} & set(sys.modules))"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert finished.stdout.split() == []
