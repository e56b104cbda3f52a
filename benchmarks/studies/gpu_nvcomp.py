"""What would ``zstd`` on the GPU cost? NVIDIA's nvCOMP compresses and decompresses frames of MsPacman there.

    pip install nvidia-libnvcomp-cu13
    python -m benchmarks.studies.gpu_nvcomp

The buffers do not use it: see docs/gpu.md. Compare it with "kernel, batch of 256" in :mod:`.gpu`. There, too, each of
the 256 transitions has five different frames.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch as th

from benchmarks.recordings import load_recording

FRAME_BYTES = 84 * 84
N_FRAMES = 256 * 5
_size = ctypes.c_size_t


class Options(ctypes.Structure):
    """nvCOMP's options, all of them at their defaults."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, help="libnvcomp.so, if it is not installed as a package")
    arguments = parser.parse_args()
    library = ctypes.CDLL(str(arguments.library or installed_library()))
    recording = load_recording("mspacman", 8_192)
    frames = np.concatenate([step.copy() for step in islice(recording.frames(), 0, N_FRAMES * 4, 4)])[:N_FRAMES]
    source = th.as_tensor(frames.reshape(N_FRAMES, FRAME_BYTES), device="cuda")
    n, stream = _size(N_FRAMES), ctypes.c_void_p(th.cuda.current_stream().cuda_stream)
    largest = _size()
    library.nvcompBatchedZstdCompressGetMaxOutputChunkSize(_size(FRAME_BYTES), Options(), ctypes.byref(largest))
    packed = th.zeros((N_FRAMES, -(-largest.value // 64) * 64), dtype=th.uint8, device="cuda")
    unpacked = th.zeros_like(source)
    sizes = th.full((N_FRAMES,), FRAME_BYTES, dtype=th.int64, device="cuda")
    packed_sizes, unpacked_sizes = th.zeros_like(sizes), th.zeros_like(sizes)
    statuses = th.zeros(N_FRAMES, dtype=th.int32, device="cuda")
    rows = [row_addresses(tensor) for tensor in (source, packed, unpacked)]
    temporary = {name: temporary_memory(library, name, stream) for name in ("Compress", "Decompress")}

    def compress() -> int:
        code: int = library.nvcompBatchedZstdCompressAsync(
            address(rows[0]), address(sizes), _size(FRAME_BYTES), n, *temporary["Compress"][:2], address(rows[1]),
            address(packed_sizes), Options(), address(statuses), stream,
        )  # fmt: skip
        return code

    def decompress() -> int:
        code: int = library.nvcompBatchedZstdDecompressAsync(
            address(rows[1]), address(packed_sizes), address(sizes), address(unpacked_sizes), n,
            *temporary["Decompress"][:2], address(rows[2]), Options(), address(statuses), stream,
        )  # fmt: skip
        return code

    for name, work in (("Compress", compress), ("Decompress", decompress)):
        taken = temporary[name][2].nbytes / 2**20
        print(f"{name} {N_FRAMES:,} frames: {device_time(work):,.0f} µs, {taken:,.0f} MiB of temporary memory")
    print(f"Bytes per frame: {packed_sizes.float().mean():,.0f}, lossless: {th.equal(source, unpacked)}")


def installed_library() -> Path:
    folder = Path(importlib.import_module("nvidia.libnvcomp").__file__ or "").parent
    return next(folder.glob("lib64/libnvcomp.so*"))


def temporary_memory(library: Any, name: str, stream: Any) -> tuple[Any, Any, th.Tensor]:
    """Allocate temporary memory, and return its address, its size and the tensor that owns it."""
    needed = _size()
    sizes = _size(N_FRAMES), _size(FRAME_BYTES), Options(), ctypes.byref(needed), _size(N_FRAMES * FRAME_BYTES)
    getattr(library, f"nvcompBatchedZstd{name}GetTempSize")(*sizes, stream)
    memory = th.empty(needed.value, dtype=th.uint8, device="cuda")
    return address(memory), needed, memory


def address(tensor: th.Tensor) -> Any:
    return ctypes.c_void_p(tensor.data_ptr())


def row_addresses(tensor: th.Tensor) -> th.Tensor:
    return tensor.data_ptr() + tensor.stride(0) * th.arange(len(tensor), device="cuda")


def device_time(work: Callable[[], int], repeats: int = 20) -> float:
    """Microseconds of device time of one call."""
    assert work() == 0, "nvCOMP returned an error"
    begin, end = (th.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return 1e3 * float(begin.elapsed_time(end)) / repeats


if __name__ == "__main__":
    main()
