"""Try the installed package as a new user would: import it, run its commands, train, save and load.

`nox --session package` runs `python try_package.py EXTRA` in a clean environment for each extra; `""` means no extra.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from stable_baselines3 import DQN, PPO

from sb3_extra_buffers.compressed import CompressedReplayBuffer, CompressedRolloutBuffer

# Modules that must be importable after installing each extra.
MODULES = {
    "atari": ["ale_py", "cv2", "sb3_extra_buffers.training_utils.atari"],
    "contrib": ["sb3_contrib", "sb3_extra_buffers.compressed.maskable_buffer"],
    "extra": ["cv2", "matplotlib", "pandas", "PIL", "pygame", "rich", "tensorboard"],
    "lerobot": ["av", "PIL", "pyarrow.parquet"],
    "minari": ["minari", "h5py", "PIL"] if sys.version_info >= (3, 11) else [],
    "plots": ["matplotlib"],
    "ray": ["ray", "sb3_extra_buffers.distributed"],
    "torchrl": ["torchrl", "sb3_extra_buffers.torchrl"],
    "zoo": ["rl_zoo3"],
    "triton": ["triton"] if sys.platform == "linux" else [],
    "video": ["imageio_ffmpeg"],
    "vizdoom": ["vizdoom"],
}
# A compression method that becomes available with each extra.
METHODS = {"isal": "igzip1", "lz4": "lz4-frame/1", "numba": "rle-jit", "zstd": "zstd-dict/3", "fast": "zstd-5"}


def train(method: str) -> None:
    model = DQN(
        "MlpPolicy",
        "CartPole-v1",
        buffer_size=2_000,
        learning_starts=50,
        replay_buffer_class=CompressedReplayBuffer,
        replay_buffer_kwargs={"compression_method": method},
    )
    model.learn(150)
    with TemporaryDirectory() as folder:
        model.replay_buffer.save(Path(folder) / "buffer.sb3x")
        assert CompressedReplayBuffer.load(Path(folder) / "buffer.sb3x").size() == model.replay_buffer.size()
    PPO("MlpPolicy", "CartPole-v1", n_steps=64, rollout_buffer_class=CompressedRolloutBuffer).learn(64)


def main() -> None:
    extra = sys.argv[1]
    for arguments in (["--help"], ["methods"]):
        subprocess.run(["sb3-extra-buffers", *arguments], check=True, stdout=subprocess.DEVNULL)
    train("auto")
    train(METHODS.get(extra, "gzip1"))
    for module in MODULES.get(extra, []):
        import_module(module)
    print(f"works with {extra or 'no extra'}")


if __name__ == "__main__":
    main()
