"""Devices to test on, and Triton's interpreter where there is no GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch as th


def _load_kernels() -> bool:
    """Where there is no GPU, for Triton's interpreter. Elsewhere in the tests, buffers on the CPU use host memory.

    It says whether there is a Triton that is new enough.
    """
    from sb3_extra_buffers.gpu_buffers.kernels import has_triton, kernel_module

    if th.cuda.is_available():
        return has_triton()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # before Triton is imported
        if has_triton():
            for name in ("append", "delta", "gather", "rle"):
                kernel_module(name)
        return has_triton()


HAS_TRITON = _load_kernels()

DEVICES = ["cpu", *(["cuda"] if th.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything happens on the device: on the CPU, kernels run in Triton's interpreter, which is slow."""
    from sb3_extra_buffers.gpu_buffers import frame_store

    if not HAS_TRITON:
        pytest.skip("needs Triton")
    if not th.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    elif "device" in request.fixturenames and request.getfixturevalue("device") == "cpu":
        pytest.skip("kernels run on the GPU here")
    monkeypatch.setattr(frame_store, "_RING_FRAMES", 20)  # so that records are written after a few steps


@pytest.fixture(params=["host memory", "kernels"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With kernels, and in host memory as on a device without Triton."""
    if request.param == "kernels":
        request.getfixturevalue("kernels")
    else:
        monkeypatch.setattr("sb3_extra_buffers.gpu_buffers.kernels.has_triton", lambda: False)
    return request.param


@pytest.fixture(autouse=True, scope="session")
def _faster_interpreter() -> None:
    """The interpreter looks at all of Triton in each call of a function, and computes running maxima one by one."""
    if th.cuda.is_available():
        return
    try:
        from triton.runtime.interpreter import InterpretedFunction, ScanOps
    except ImportError:
        return
    slow = ScanOps.generic_scan

    def scan(self: Any, inputs: Any) -> Any:
        if self.combine_fn.__name__ != "_larger":
            return slow(self, inputs)
        values = np.maximum.accumulate(inputs[0].handle.data, axis=self.axis)
        return [self.to_tensor(values, inputs[0].dtype)]

    slow_call, prepared = InterpretedFunction.__call__, set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The launch of a kernel prepares all that our functions need; Triton's own stay prepared after the first call.
        if self.fn in prepared or self.fn.__module__.startswith("sb3_extra_buffers"):
            return self.rewrite()(*args, **kwargs)
        prepared.add(self.fn)
        return slow_call(self, *args, **kwargs)

    ScanOps.generic_scan = scan
    InterpretedFunction.__call__ = call
