"""Loads a file with ``mmap=True``, uses it, and prints the anonymous memory that each step took, as JSON.

python -m tests.persistence.mapping_probe FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from tests.persistence.disk_probe import anonymous_memory
from tests.persistence.memory_probe import N_ENVS, fill, make_buffer


def main(path: Path) -> None:
    warm = make_buffer(60)  # has everything imported and compiled
    fill(warm, 100)
    warm.sample(10)
    warm.save(path.with_name("small"))
    fill(CompressedReplayBuffer.load(path.with_name("small"), "cpu", mmap=True), 10)
    before = anonymous_memory()
    found = {}
    buffer: Any = CompressedReplayBuffer.load(path, "cpu", mmap=True)
    found["load"] = anonymous_memory() - before
    for slot in range(0, buffer.size(), 100):
        buffer._stores[""].read([(0, np.full(N_ENVS, slot))], np.arange(N_ENVS))
    found["read"] = anonymous_memory() - before
    for name, steps in (("add", 1), ("add more", 100)):
        fill(buffer, steps)
        found[name] = anonymous_memory() - before
    memory = buffer._stores[""].frames.arena._memory
    memory.resize(5 * len(memory.data))
    found["grow"] = anonymous_memory() - before
    found["data"] = buffer.memory_usage().total
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
