"""Writes a small file of each kind of buffer, to be kept: whatever comes later must read them.

    python -m tests.persistence.make_fixtures

Only files that are not there yet are written. Beside each lies what a batch from it is, as numbers.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from tests.persistence.buffers import RGB, SLOTS, add, draw, goal_env, make, steps_for

FOLDER = Path(__file__).with_name("fixtures")
SEED = 7

FIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("CompressedReplayBuffer", {"compression_method": "none"}),
    "rle": ("CompressedReplayBuffer", {"compression_method": "rle"}),
    "gzip": ("CompressedReplayBuffer", {"compression_method": "gzip6"}),
    "igzip": ("CompressedReplayBuffer", {"compression_method": "igzip1"}),
    "zstd": ("CompressedReplayBuffer", {"compression_method": "zstd3"}),
    "lz4-frame": ("CompressedReplayBuffer", {"compression_method": "lz4-frame/1"}),
    "lz4-block": ("CompressedReplayBuffer", {"compression_method": "lz4-block/1"}),
    "delta": ("CompressedReplayBuffer", {"compression_method": "delta"}),
    "zstd-dict": (
        "CompressedReplayBuffer",
        {"compression_method": "zstd-dict/3", "compression_kwargs": {"frames_per_record": 4}, "frame_stack": 4},
    ),
    "delta-zstd": (
        "CompressedReplayBuffer",
        {"compression_method": "delta-zstd", "compression_kwargs": {"frames_per_record": 4}, "frame_stack": 4},
    ),
    "bitpack": ("CompressedReplayBuffer", {"space": RGB, "compression_method": "bitpack"}),
    "pixel-lz": ("CompressedReplayBuffer", {"space": RGB, "compression_method": "pixel-lz"}),
    "indexed-colour": (
        "CompressedReplayBuffer",
        {"space": RGB, "frame_stack": 4, "compression_method": "delta", "compression_kwargs": {"indexed_colour": True}},
    ),
    "dict-n-step": ("CompressedDictNStepReplayBuffer", {"n_steps": 2, "compression_method": "gzip1"}),
    "prioritized": ("CompressedPrioritizedReplayBuffer", {"compression_method": "delta"}),
    "her": ("CompressedHerReplayBuffer", {"copy_info_dict": True, "compression_method": "none"}),
    "rollout": ("CompressedRolloutBuffer", {"compression_method": "delta"}),
    "recurrent": ("CompressedRecurrentRolloutBuffer", {"compression_method": "none"}),
    "maskable-dict": ("CompressedMaskableDictRolloutBuffer", {"compression_method": "none"}),
    "auto": ("CompressedReplayBuffer", {"compression_method": "auto"}),
    "saved-twice": ("CompressedReplayBuffer", {"compression_method": "delta"}),
    "on-disk": ("CompressedReplayBuffer", {"compression_method": "rle", "storage": "mmap"}),
    "gpu": ("GpuReplayBuffer", {"compression_method": "delta"}),
    "gpu-dense": ("GpuRolloutBuffer", {"compression_method": "none"}),
}


def batch_of(name: str) -> dict[str, np.ndarray]:
    """A batch from a copy of the file, or of the folder, of that name, flat."""
    cls, original = FIXTURES[name][0], FOLDER / name
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        (shutil.copytree if original.is_dir() else shutil.copy)(original, path)
        buffer = BaseCompressedBuffer.load(path, "cpu", env=goal_env() if "Her" in cls else None)
        batch: Any = draw(buffer, SEED)
    found: dict[str, np.ndarray] = {}
    for number, part in enumerate(batch):
        parts = part if isinstance(part, dict) else {"": part}
        for key, value in parts.items():
            if value is not None:
                # Torch's tensors and NumPy's arrays alike; states of a recurrent network come in pairs of pairs.
                values = value if isinstance(value, tuple) else [value]
                for i, array in enumerate(values):
                    arrays = [np.asarray(part) for part in array] if isinstance(array, tuple) else array
                    found[f"{number}.{key}.{i}"] = np.asarray(arrays)
    return found


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, (cls, arguments) in FIXTURES.items():
        if not (FOLDER / name).exists():
            on_disk = arguments.get("storage") == "mmap"
            buffer: Any = make(cls, **arguments, **({"path": FOLDER / name} if on_disk else {}))
            count = SLOTS if "Rollout" in cls else SLOTS + 20
            for number, step in enumerate(steps_for(buffer, count)):
                add(buffer, step, number)
                if name == "saved-twice" and number == SLOTS:
                    buffer.save(FOLDER / name)
            if on_disk:
                buffer.close()
            else:
                buffer.save(FOLDER / name)
            np.savez_compressed(FOLDER / f"{name}.npz", **batch_of(name))


if __name__ == "__main__":
    main()
