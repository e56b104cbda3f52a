"""Save checkpoints of a model together with its replay buffer, and resume from the newest complete one.

A checkpoint is a folder with ``model.zip`` (saved by SB3), ``buffer`` (saved by :meth:`BaseCompressedBuffer.save`) and,
if a ``VecNormalize`` wraps the environment, ``vec_normalize.pkl``. ``complete.json`` is written last and identifies the
content of these files. Checkpoints rotate through ``keep + 1`` folders, so that a crash while saving never destroys the
last good one, and each save only writes what changed in its folder.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, TypeVar

import torch as th
import xxhash
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import VecNormalize

from sb3_extra_buffers.compressed.base import BaseCompressedBuffer
from sb3_extra_buffers.distributed.buffer import ShardedReplayBuffer
from sb3_extra_buffers.errors import ConfigurationError, CorruptDataError, FileFormatError
from sb3_extra_buffers.persistence import disk
from sb3_extra_buffers.persistence.container import Container
from sb3_extra_buffers.training_utils.collection import end_episodes

Algorithm = TypeVar("Algorithm", bound=BaseAlgorithm)

_MODEL, _BUFFER, _VEC_NORMALIZE, _COMPLETE = "model.zip", "buffer", "vec_normalize.pkl", "complete.json"


class CheckpointBufferCallback(BaseCallback):
    """Saves the model together with its replay buffer, every few steps and when training ends.

    At least the last ``keep`` checkpoints are complete at any time, even if the process is killed. For on-policy
    algorithms only the model is saved, because every rollout starts with an empty buffer.

    :param every: Steps between two checkpoints, counted over all environments.
    :param path: The folder for the checkpoints.
    :param keep: How many checkpoints to keep.
    """

    def __init__(self, every: int, path: str | Path, keep: int = 1, verbose: int = 0) -> None:
        if every < 1 or keep < 1:
            raise ConfigurationError(f"every and keep must be at least 1, not {every} and {keep}.")
        super().__init__(verbose)
        self.every = every
        self.path = Path(path)
        self.keep = keep
        self._saved_at: int | None = None

    def save(self) -> Path:
        """Save a checkpoint now, and return its folder."""
        folder, number = self._next()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _COMPLETE).unlink(missing_ok=True)
        buffer, normalization = self._buffer(), self.model.get_vec_normalize_env()
        if buffer is not None:
            buffer.save(folder / _BUFFER)
        self.model.save(folder / _MODEL)
        if normalization is not None:
            normalization.save(str(folder / _VEC_NORMALIZE))
        # An earlier run may have left files that are not part of this checkpoint.
        for name, saved in ((_BUFFER, buffer), (_VEC_NORMALIZE, normalization)):
            if saved is None:
                (folder / name).unlink(missing_ok=True)
        disk.sync_all(folder)
        with disk.replacing(folder / _COMPLETE) as file:
            file.write(json.dumps({"number": number, **_contents(folder)}).encode())
        self._saved_at = self.num_timesteps
        if self.verbose:
            self.logger.log(f"Checkpoint after {self.num_timesteps} steps in {folder}")
        return folder

    @staticmethod
    def newest(path: str | Path) -> Path | None:
        """The folder of the newest complete checkpoint, or ``None`` if there is none."""
        numbers = {folder: _number(folder) for folder in sorted(Path(path).glob("checkpoint_*"))}
        newest = max(numbers, key=lambda folder: numbers[folder], default=None)
        return newest if newest is not None and numbers[newest] > 0 else None

    @classmethod
    def resume(
        cls,
        model_class: type[Algorithm],
        path: str | Path,
        env: GymEnv | None = None,
        device: th.device | str = "auto",
        mmap: bool = False,
        **kwargs: Any,
    ) -> Algorithm | None:
        """Load the model of the newest complete checkpoint with its buffer, or return ``None`` if there is none.

        Continue with ``model.learn(..., reset_num_timesteps=False)``. A ``VecNormalize`` wrapper of ``env`` gets the
        saved statistics.

        :param mmap: Passed to :meth:`BaseCompressedBuffer.load`, for buffers that are larger than memory.
        :param kwargs: Further arguments for ``model_class.load``.
        """
        folder = cls.newest(path)
        if folder is None:
            return None
        model = model_class.load(folder / _MODEL, env=env, device=device, **kwargs)
        normalization = model.get_vec_normalize_env()
        if normalization is not None and (folder / _VEC_NORMALIZE).exists():
            saved = VecNormalize.load(str(folder / _VEC_NORMALIZE), normalization.venv)
            normalization.obs_rms, normalization.ret_rms = saved.obs_rms, saved.ret_rms
        if (folder / _BUFFER).exists():
            buffer: Any = BaseCompressedBuffer.load(folder / _BUFFER, model.device, mmap, model.get_env())
            end_episodes(buffer)  # the environments start new episodes
            model.replay_buffer = buffer  # type: ignore[attr-defined]  # of off-policy algorithms
        return model

    def _on_training_start(self) -> None:
        self._buffer()  # raises now, not at the first checkpoint, if the buffer cannot be saved
        self._saved_at = self.num_timesteps

    def _on_step(self) -> bool:
        if self.num_timesteps - (self._saved_at or 0) >= self.every:
            self.save()
        return True

    def _on_training_end(self) -> None:
        if self._saved_at != self.num_timesteps:
            self.save()

    def _buffer(self) -> BaseCompressedBuffer | None:
        buffer = getattr(self.model, "replay_buffer", None)
        if isinstance(buffer, ShardedReplayBuffer):
            raise ConfigurationError(
                f"A {type(buffer).__name__} has parts, which a checkpoint cannot hold. Save it on its own, with "
                "model.replay_buffer.save(folder), and the model with SB3's CheckpointCallback."
            )
        if buffer is not None and not isinstance(buffer, BaseCompressedBuffer):
            raise ConfigurationError(
                f"A {type(buffer).__name__} cannot be saved in a checkpoint. Use a buffer of this library, "
                "such as replay_buffer_class=CompressedReplayBuffer."
            )
        return buffer

    def _next(self) -> tuple[Path, int]:
        """The folder to overwrite (an incomplete one, else the oldest), and the number of the new checkpoint."""
        numbers = {folder: _number(folder) for folder in self.path.glob("checkpoint_*")}
        usable = [self.path / f"checkpoint_{i}" for i in range(self.keep + 1)]
        return min(usable, key=lambda folder: numbers.get(folder, 0)), max(numbers.values(), default=0) + 1


def _contents(folder: Path) -> dict[str, Any]:
    """What identifies the files: checksums; for the buffer, which has its own, the number of saves and its length."""
    found: dict[str, Any] = {
        name: xxhash.xxh3_128_hexdigest((folder / name).read_bytes())
        for name in (_MODEL, _VEC_NORMALIZE)
        if (folder / name).exists()
    }
    if (folder / _BUFFER).exists():
        with Container.open(folder / _BUFFER) as file:
            found[_BUFFER] = [file.generation, file.end]
    return found


def _number(folder: Path) -> int:
    """The number of a checkpoint, counted from 1, or 0 if it is incomplete."""
    with contextlib.suppress(OSError, ValueError, KeyError, CorruptDataError, FileFormatError):
        expected = json.loads((folder / _COMPLETE).read_bytes())
        number = int(expected.pop("number"))
        if expected == _contents(folder):
            return number
    return 0
