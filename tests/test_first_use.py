"""What the library costs before it does anything: imports, compilation, missing packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

IMPORT = """
import time
import stable_baselines3  # what users have imported anyway
began = time.process_time()
import sb3_extra_buffers.compressed
print(time.process_time() - began)
"""
USE = """
import time
import numpy as np
from gymnasium import spaces
from sb3_extra_buffers.compressed import CompressedReplayBuffer
imported = time.process_time()
buffer = CompressedReplayBuffer(500, spaces.Box(0, 255, (4, 36, 36), np.uint8), spaces.Discrete(2), "cpu")
frames = np.random.default_rng(0).integers(0, 2, (120, 36, 36), dtype=np.uint8)
for t in range(110):
    buffer.add(frames[None, t : t + 4], frames[None, t + 1 : t + 5], np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
buffer.sample(32)
print(time.process_time() - imported)
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result


def test_importing_the_library_takes_less_than_a_third_of_a_second() -> None:
    assert min(float(run(IMPORT).stdout) for _ in range(3)) < 0.3  # the best, since other tests run meanwhile


def test_first_use_compiles_within_20_seconds_and_logs_it_and_the_next_takes_less_than_one(tmp_path: Path) -> None:
    logging = "import logging; logging.basicConfig()"
    first = run(logging + USE, NUMBA_CACHE_DIR=str(tmp_path))
    assert float(first.stdout) < 20  # of CPU time, with both cores busy; 13 when they are not
    assert first.stderr.count("Compiling kernels") == 1
    later = [run(USE, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(3)]
    assert min(float(use.stdout) for use in later) < 1  # of which trying the candidates of "auto" takes half
    assert later[0].stderr == ""


MINIMUM = """
import sys
for name in ("numba", "zstandard", "lz4", "isal", "sb3_contrib", "triton"):
    sys.modules[name] = None
import warnings
import gymnasium as gym
import numpy as np
from stable_baselines3 import DQN, PPO
from sb3_extra_buffers.compressed import CompressedReplayBuffer, CompressedRolloutBuffer, find_smallest_dtype, has_numba
from sb3_extra_buffers.errors import MissingPackageError
assert not has_numba()
"""


@pytest.mark.parametrize(
    "use",
    [
        """
dtypes = dict(elem_type=np.uint8, runs_type=find_smallest_dtype(4))
with warnings.catch_warnings(record=True):
    PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, n_epochs=1, rollout_buffer_class=CompressedRolloutBuffer,
        rollout_buffer_kwargs=dict(dtypes=dtypes, compression_method="rle")).learn(128)
""",
        """
DQN("MlpPolicy", "CartPole-v1", buffer_size=99, replay_buffer_class=CompressedReplayBuffer).learn(200)
""",
        """
space = gym.spaces.Box(0, 255, (4, 36, 36), np.uint8)
buffer = CompressedReplayBuffer(1000, space, gym.spaces.Discrete(2), "cpu", prefer="memory")
frames = np.zeros((1000, 36, 36), dtype=np.uint8)
frames[np.arange(1000), np.arange(1000) % 36] = 7
for t in range(990):
    buffer.add(frames[None, t : t + 4], frames[None, t + 1 : t + 5], np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
assert buffer.memory_usage().ratio > 10, buffer.memory_usage()
assert (buffer.observations[5, 0] == frames[5:9]).all()
""",
        """
try:
    CompressedReplayBuffer(9, gym.spaces.Discrete(2), gym.spaces.Discrete(2), compression_method="zstd-5")
except MissingPackageError as error:
    assert "sb3-extra-buffers[zstd]" in str(error)
else:
    raise AssertionError
""",
    ],
    ids=["classic PPO example", "DQN", "auto on images", "missing package"],
)
def test_the_minimum_install_works(use: str) -> None:
    run(MINIMUM + use)
