"""Names, dtypes, sizes, single observations and errors."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

import sb3_extra_buffers.gpu_buffers as gpu_buffers
from sb3_extra_buffers.compatibility.device import (
    CURVES,
    MEASURED_RATIOS,
    estimate_max_slot_bytes,
    estimate_ratio,
    estimate_total_heap_bytes,
    numpy_dtype_to_torch,
    torch_dtype_to_numpy,
)
from sb3_extra_buffers.errors import ConfigurationError, UnknownMethodError
from sb3_extra_buffers.gpu_buffers import COMPRESSION_METHOD_MAP, GpuReplayBuffer, find_gpu_buffer_dtypes
from tests.gpu.helpers import IMAGES

SCRIPT = Path(__file__).parents[2] / "scripts" / "fit_heap_heuristic.py"


def test_names() -> None:
    assert set(gpu_buffers.__all__) == {
        "COMPRESSION_METHOD_MAP",
        "BaseGpuBuffer",
        "GpuDictPrioritizedSequenceReplayBuffer",
        "GpuDictReplayBuffer",
        "GpuDictRolloutBuffer",
        "GpuDictSequenceReplayBuffer",
        "GpuPrioritizedSequenceReplayBuffer",
        "GpuReplayBuffer",
        "GpuRolloutBuffer",
        "GpuSequenceReplayBuffer",
        "find_gpu_buffer_dtypes",
        "has_zstd",
    }


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("base", ["BaseGpuBuffer"]),
        ("raw_buffer", ["RawBuffer", "SharedRawHeap"]),
        ("metadata", ["SlotMetadata"]),
        ("observation_store", ["DenseObservationStore", "PackedObservationStore"]),
        ("size_estimation", ["CURVES", "MEASURED_RATIOS", "estimate_ratio"]),
        ("utils", ["numpy_dtype_to_torch", "torch_dtype_to_numpy", "estimate_max_slot_bytes"]),
        ("utils", ["estimate_total_heap_bytes", "find_gpu_buffer_dtypes"]),
    ],
)
def test_modules_of_earlier_versions(module: str, names: list[str]) -> None:
    found = importlib.import_module(f"sb3_extra_buffers.gpu_buffers.{module}")
    assert all(hasattr(found, name) for name in names)


class TestArguments:
    @pytest.mark.parametrize("method", ["gzip", "lz4-frame/1", "zstd-dict", "igzip1"])
    def test_methods_of_the_host_are_refused(self, method: str) -> None:
        with pytest.raises(UnknownMethodError, match="none, rle, zstd, delta"):
            GpuReplayBuffer(10, IMAGES, spaces.Discrete(2), "cpu", compression_method=method)

    @pytest.mark.parametrize(
        "options",
        [
            {"heap_bytes": 0},
            {"max_slot_bytes": -1},
            {"compression_method": "delta", "compression_kwargs": {"indexed_colour": True}},
        ],
        ids=str,
    )
    def test_values_that_cannot_work(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError):
            GpuReplayBuffer(10, IMAGES, spaces.Discrete(2), "cpu", **options)

    def test_images_are_compressed_and_vectors_are_not(self) -> None:
        space = spaces.Dict({"image": IMAGES, "vector": spaces.Box(0, 1, (3,), np.float32)})
        buffer = gpu_buffers.GpuDictReplayBuffer(10, space, spaces.Discrete(2), "cpu")
        assert buffer.memory_usage().method == "image: delta (not enough seen yet), vector: none"

    def test_torch_dtypes_may_be_given(self) -> None:
        dtypes = find_gpu_buffer_dtypes(IMAGES.shape, compression_method="rle")
        assert dtypes == {"elem_type": th.uint8, "runs_type": th.uint16}
        buffer = GpuReplayBuffer(10, IMAGES, spaces.Discrete(2), "cpu", compression_method="rle", dtypes=dtypes)
        assert buffer._stores[""].stored_dtype == np.uint8

    def test_a_narrower_dtype_is_lossy_and_says_so(self) -> None:
        space = spaces.Box(-1000, 1000, (3,), np.float32)
        with pytest.warns(UserWarning, match="stored as uint8"):
            buffer = GpuReplayBuffer(10, space, spaces.Discrete(2), "cpu", dtypes=th.uint8)
        observations = np.array([[-5.0, 7.9, 900.0]], np.float32)
        buffer.add(observations, observations, np.zeros(1), np.zeros(1), np.zeros(1), [{}])
        assert buffer.sample(1).observations.tolist() == [[0.0, 7.0, 255.0]]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int64, np.float32, np.float64, np.bool_])
def test_dtypes_there_and_back(dtype: Any) -> None:
    assert torch_dtype_to_numpy(numpy_dtype_to_torch(dtype)) == np.dtype(dtype)


@pytest.mark.parametrize("method", COMPRESSION_METHOD_MAP)
def test_single_observations(method: str, device: str) -> None:
    observation = th.arange(60, dtype=th.float32, device=device).reshape(3, 20) // 7
    data = COMPRESSION_METHOD_MAP[method].compress(observation)
    assert (data.dtype, data.device.type) == (th.uint8, device)
    again = COMPRESSION_METHOD_MAP[method].decompress(data, arr_configs={"shape": (3, 20), "dtype": th.float32})
    assert th.equal(again, observation)


class TestSizeEstimation:
    @pytest.mark.parametrize("method", MEASURED_RATIOS)
    def test_measured_ratios_are_met(self, method: str) -> None:
        assert estimate_ratio(method) == pytest.approx(MEASURED_RATIOS[method], rel=0.35)

    @pytest.mark.parametrize(
        "method", ["zstd-100", "zstd-1", "zstd22", "lz4-frame/-5", "lz4-frame/16", "gzip9", "igzip0"]
    )
    def test_never_outside_what_was_measured(self, method: str) -> None:
        family = next(name for name in CURVES if method.startswith(name))
        low, high = CURVES[family].ratios
        assert low <= estimate_ratio(method) <= high

    @pytest.mark.parametrize("method", ["auto", "bitpack", "delta-zstd", "pixel-lz"])
    def test_methods_that_were_not_measured(self, method: str) -> None:
        with pytest.raises(ConfigurationError, match=f"no estimate for '{method}', only for delta, gzip"):
            estimate_ratio(method)

    def test_a_slot_and_a_heap(self) -> None:
        assert estimate_max_slot_bytes((4, 10), th.float32, "none", overalloc_factor=1.0) == 161
        assert estimate_max_slot_bytes((4, 10), np.uint8, "rle") == 46
        assert estimate_total_heap_bytes(10, (4, 10), np.uint8, "rle") == 460

    @pytest.mark.skipif(not SCRIPT.exists(), reason="not part of a source distribution")
    def test_the_curves_are_those_that_the_script_fits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--check"])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        assert end.value.code == 0
