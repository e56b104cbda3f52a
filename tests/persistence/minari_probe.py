"""Imports a dataset of Minari into a buffer on disk, and prints what that took of this process, as JSON.

python -m tests.persistence.minari_probe SMALL_DATASET DATASET FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import minari

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from tests.persistence.disk_probe import anonymous_memory


def main(small: str, name: str, folder: Path) -> None:
    options: dict[str, Any] = {"compression_method": "none", "storage": "mmap"}
    # Has everything imported and compiled.
    CompressedReplayBuffer.from_minari(small, "cpu", path=folder / "small", **options).sample(256)
    dataset = minari.load_dataset(name)
    before = most = anonymous_memory()
    iterate = dataset.iterate_episodes

    def measured() -> Iterator[Any]:
        nonlocal most
        for episode in iterate():
            yield episode
            most = max(most, anonymous_memory())

    dataset.iterate_episodes = measured
    buffer = CompressedReplayBuffer.from_minari(dataset, "cpu", path=folder / "buffer", **options)
    buffer.sample(256)
    most = max(most, anonymous_memory())
    sys.stdout.write(json.dumps({"anonymous": most - before, "data": buffer.memory_usage().total}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
