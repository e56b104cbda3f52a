"""The user's environment, played into a temporary file with a progress bar."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tqdm import tqdm

from sb3_extra_buffers.measure.environments import make_env
from sb3_extra_buffers.measure.play_file import PlayFile, write_play
from sb3_extra_buffers.measure.playing import load_policy, play


@contextmanager
def played(
    env_id: str,
    n_envs: int,
    frame_stack: int | None,
    seed: int,
    steps: int,
    policy: Path | None = None,
    algorithm: str | None = None,
) -> Iterator[PlayFile]:
    """Play, and keep the file for the time of the ``with`` block."""
    with tempfile.TemporaryDirectory(prefix="sb3-extra-buffers-") as folder:
        with closing(make_env(env_id, n_envs, seed, frame_stack)) as env:
            model = None if policy is None else load_policy(policy, env, algorithm)
            bar = tqdm(play(env, steps, seed, model), f"playing {env_id}", total=steps, unit="step")
            file = write_play(Path(folder) / "play", env, bar)
        yield file
