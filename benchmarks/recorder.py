"""Play environments, and write recordings to the cache. :mod:`benchmarks.recordings` reads them."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from stable_baselines3.common.vec_env import VecEnv
from tqdm import tqdm

from benchmarks import CACHE, peers
from benchmarks.environments import ENVIRONMENTS, EXTRA, make_env
from benchmarks.recordings import CHUNK_STEPS, SEED, Frames, Recording, Transition, channels_last, transitions


class StickyPolicy:
    """Random actions that are often repeated, with the ``predict`` method of an SB3 model."""

    def __init__(
        self, space: gym.Space[Any], n_envs: int, seed: int, repeat: float, weights: tuple[float, ...] | None = None
    ) -> None:
        self.space = space
        self.repeat = repeat
        self._rng = np.random.default_rng(seed)
        self._probabilities = None if weights is None else np.array(weights) / sum(weights)
        self._actions = self._draw(n_envs)

    def predict(self, observation: Any, **kwargs: Any) -> tuple[npt.NDArray[Any], None]:
        drawn = self._draw(len(self._actions))
        changes = self._rng.random(len(drawn)) >= self.repeat
        self._actions = np.where(changes.reshape(-1, *[1] * (drawn.ndim - 1)), drawn, self._actions)
        return self._actions, None

    def _draw(self, count: int) -> npt.NDArray[Any]:
        if isinstance(self.space, gym.spaces.Discrete):
            return self._rng.choice(int(self.space.n), size=count, p=self._probabilities)
        assert isinstance(self.space, gym.spaces.Box)
        return self._rng.uniform(self.space.low, self.space.high, (count, *self.space.shape)).astype(self.space.dtype)


def play(name: str, n_envs: int, steps: int, env: VecEnv) -> Iterator[Transition]:
    """Play random actions, and yield the transitions as SB3 stores them, with terminal observations as ``next_obs``."""
    # Not at the top: a process that measures another library on a recording does not have this one.
    from sb3_extra_buffers.measure.transitions import collect

    how = ENVIRONMENTS[name]
    policy: Any = StickyPolicy(env.action_space, n_envs, SEED, how.repeat, how.weights) if how.repeat else None
    for transition in collect(env, steps, SEED, policy):
        stored = Transition(*transition)
        if isinstance(space := env.action_space, gym.spaces.Box):  # off-policy algorithms store scaled actions
            stored = stored._replace(action=2.0 * ((stored.action - space.low) / (space.high - space.low)) - 1.0)
        yield stored


def record(name: str, steps: int, n_envs: int = 4) -> Path:
    """Play ``steps`` steps and write them to the cache."""
    path = CACHE / f"{name}-{n_envs}x{steps}.npz"
    CACHE.mkdir(exist_ok=True)
    if is_played_elsewhere(name):
        play_elsewhere(name, steps, n_envs)
    else:
        _record_here(path, name, steps, n_envs)
    return path


def is_played_elsewhere(name: str) -> bool:
    """Whether the environment needs packages that this process does not have."""
    return ENVIRONMENTS[name].extra and Path(sys.prefix) != peers.python_for(EXTRA).parent.parent


def play_elsewhere(name: str, steps: int, n_envs: int, check_steps: int = 0) -> None:
    """Record, and check, in the virtual environment :data:`EXTRA`. It is created first if it is missing."""
    import sb3_extra_buffers

    peers.prepare(EXTRA)
    python, library = peers.python_for(EXTRA), Path(sb3_extra_buffers.__file__).parents[1]
    options = ["--names", name, "--steps", str(steps), "--n-envs", str(n_envs), "--check", str(check_steps)]
    done = subprocess.run(
        [str(python), "-m", "benchmarks.recordings", *options],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONPATH": str(library), "PYTHONWARNINGS": "ignore"},
        check=False,
    )
    if done.returncode:
        raise peers.MissingPeerError(f"{name} could not be recorded by {python}; its error is above")


def _record_here(path: Path, name: str, steps: int, n_envs: int) -> None:
    env = make_env(name, n_envs, SEED)
    stack = ENVIRONMENTS[name].stack
    actions, rewards, dones, truncated = [], [], [], []
    last_frames: list[Frames] = []
    chunk: list[Frames] = []

    def newest(observations: Any) -> Frames:
        frames = flatten(observations)
        return frames[..., -(frames.shape[-1] // stack) :]

    unfinished = path.with_suffix(f".{os.getpid()}")  # two processes may make the same recording at once
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED, compresslevel=3) as archive:
        # One extra step: its observations are the next observations of the last transition.
        played = play(name, n_envs, steps + 1, env)
        for step, transition in enumerate(tqdm(played, name, total=steps + 1, unit="step")):
            chunk.append(newest(transition.obs).copy())
            if len(chunk) == CHUNK_STEPS or step == steps:
                _write(archive, f"frames_{step // CHUNK_STEPS:05}", np.stack(chunk))
                shape, dtype = chunk[0].shape[1:], chunk[0].dtype
                chunk.clear()
            if step < steps:
                actions.append(transition.action)
                rewards.append(transition.reward)
                dones.append(transition.done)
                truncated.append([info["TimeLimit.truncated"] for info in transition.infos])
                last_frames.extend(newest(transition.next_obs)[transition.done])
        _write(archive, "actions", np.array(actions))
        _write(archive, "rewards", np.array(rewards))
        _write(archive, "dones", np.array(dones))
        _write(archive, "truncated", np.array(truncated))
        _write(archive, "last_frames", np.array(last_frames, dtype).reshape(-1, *shape))
        if isinstance(env.action_space, gym.spaces.Discrete):
            _write(archive, "n_actions", np.array(env.action_space.n))
        if isinstance(transition.obs, dict):
            _write(archive, "keys", np.array(list(transition.obs)))
            _write(archive, "widths", np.array([part.shape[1] for part in transition.obs.values()]))
    env.close()
    unfinished.replace(path)


def flatten(observations: Any) -> Frames:
    """Return one array: images with channels last, or the vectors of a dict, concatenated."""
    if isinstance(observations, dict):
        return np.concatenate(list(observations.values()), axis=1)
    return channels_last(observations)


def check(recording: Recording, steps: int) -> None:
    """Compare the first ``steps`` rebuilt transitions with those of the real environment; raise if they differ."""
    env = make_env(recording.name, recording.n_envs, SEED)
    pairs = zip(play(recording.name, recording.n_envs, steps, env), transitions(recording), strict=False)
    for step, (real, rebuilt) in enumerate(tqdm(pairs, f"checking {recording.name}", total=steps, unit="step")):
        for field in ("obs", "next_obs", "action", "reward", "done"):
            if not _is_same(getattr(real, field), getattr(rebuilt, field)):
                raise AssertionError(f"{recording.name}: {field} of step {step} is not what the environment gave")
        if [info["TimeLimit.truncated"] for info in real.infos] != [i["TimeLimit.truncated"] for i in rebuilt.infos]:
            raise AssertionError(f"{recording.name}: infos of step {step} are not what the environment gave")
    env.close()


def _is_same(one: Any, other: Any) -> bool:
    """Whether values, dtype and memory layout are the same; for dicts, of all keys."""
    if isinstance(one, dict):
        return list(one) == list(other) and all(_is_same(one[key], other[key]) for key in one)
    return one.dtype == other.dtype and _layout(one) == _layout(other) and np.array_equal(one, other)


def _layout(array: npt.NDArray[Any]) -> list[int]:
    return [stride for stride, length in zip(array.strides, array.shape, strict=True) if length > 1]


def _write(archive: zipfile.ZipFile, name: str, array: npt.NDArray[Any]) -> None:
    with archive.open(f"{name}.npy", "w") as member:
        np.lib.format.write_array(member, array)
