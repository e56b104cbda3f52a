"""Recordings of real environments, played back exactly as SB3 passes transitions to a replay buffer.

A recording keeps the newest frame of every observation, not the whole stack: 100,000 Atari transitions are 0.7 GB
instead of 5.6 GB, and some tens of megabytes on disk. :func:`transitions` rebuilds the stacks, bit for bit. It reads a
few hundred frames at a time, so that playback hardly adds to the memory of the process under measurement.

    python -m benchmarks.recordings --names mspacman,pong --steps 25000

creates missing recordings (:mod:`benchmarks.recorder`). ``--check`` plays the real environment again and compares.
"""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from benchmarks import CACHE
from benchmarks.environments import ATARI_STACK, ENVIRONMENTS, NOISE

SEED = 0
CHUNK_STEPS = 256
READ_BYTES = 1 << 16

Frames = npt.NDArray[Any]
"""Images with channels last, or vectors, with one row per environment."""
Observations = Any
"""An array with one row per environment, or a dict of such arrays."""


class Transition(NamedTuple):
    """The arguments of ``ReplayBuffer.add``, one row per environment."""

    obs: Observations
    next_obs: Observations
    action: npt.NDArray[Any]
    reward: npt.NDArray[np.float32]
    done: npt.NDArray[np.bool_]
    infos: list[dict[str, Any]]


@dataclass(frozen=True)
class Recording:
    """``steps`` steps of ``n_envs`` environments, played by a random policy."""

    name: str
    path: Path
    steps: int
    n_envs: int
    stack: int
    action_space: gym.spaces.Discrete | gym.spaces.Box
    observation_space: Any
    """A Box, or a Dict of them."""
    frame_shape: tuple[int, ...]
    actions: npt.NDArray[Any]
    """As SB3 stores them: continuous ones are scaled to [-1, 1]."""
    rewards: npt.NDArray[np.float32]
    dones: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    last_frames: Frames
    """The last frame of each episode, in the order of ``np.nonzero(dones)``."""

    def new_chunk(self) -> Frames:
        """Allocate memory for :meth:`frames`."""
        return np.empty((CHUNK_STEPS, self.n_envs, *self.frame_shape), self.last_frames.dtype)

    def present(self, stacked: Frames) -> Observations:
        """Observations as the environment returns them: images with channels first, or a dict of vectors."""
        if isinstance(self.observation_space, gym.spaces.Dict):
            widths = [space.shape[0] for space in self.observation_space.values()]  # type: ignore[index]  # all are Box
            parts = np.split(stacked, np.cumsum(widths)[:-1], axis=1)
            return {key: part.copy() for key, part in zip(self.observation_space, parts, strict=True)}
        return channels_first(stacked)

    def frames(self, start: int = 0, chunk: Frames | None = None) -> Iterator[Frames]:
        """Yield the newest frame of every environment, from step ``start`` on, with one more at the end.

        The arrays are overwritten later: all chunks are unpacked into the same memory, ``chunk`` if given, so that
        playback does not add to the memory of the process under measurement.
        """

        def stored() -> Iterator[Frames]:
            memory = self.new_chunk() if chunk is None else chunk
            with zipfile.ZipFile(self.path) as archive:
                names = sorted(name for name in archive.namelist() if name.startswith("frames_"))
                for name in names[start // CHUNK_STEPS :]:
                    yield from _read_into(memory, archive, name)

        return islice(stored(), start % CHUNK_STEPS, start % CHUNK_STEPS + self.steps - start + 1)


@dataclass(frozen=True)
class Noise(Recording):
    """Observations of random bytes. No two share a frame, and none can be compressed."""

    def frames(self, start: int = 0, chunk: Frames | None = None) -> Iterator[Frames]:
        rng = np.random.default_rng(start)
        for _ in range(self.steps - start + 1):
            yield rng.integers(256, size=(self.n_envs, *self.frame_shape), dtype=np.uint8)


def load_recording(name: str, steps: int, n_envs: int = 4) -> Recording:
    """Load ``steps`` steps of a recording. If no recording in the cache is long enough, make one first."""
    if name == NOISE:
        return _noise(steps, n_envs)
    if name not in ENVIRONMENTS:
        raise ValueError(f"unknown recording {name!r}; the known ones are {', '.join(ENVIRONMENTS)} and {NOISE}")
    for recorded, path in _cached(name, n_envs):
        if recorded >= steps:
            return _read(path, name, steps, n_envs)
    from benchmarks import recorder  # not at the top: only needed for recording

    return _read(recorder.record(name, steps, n_envs), name, steps, n_envs)


def longest_recording(name: str, n_envs: int = 4) -> int:
    """The steps of the longest recording in the cache."""
    return max((steps for steps, _ in _cached(name, n_envs)), default=0)


def _cached(name: str, n_envs: int) -> list[tuple[int, Path]]:
    """The recordings in the cache with their steps, from short to long."""
    return sorted((int(path.stem.split("x")[-1]), path) for path in CACHE.glob(f"{name}-{n_envs}x*.npz"))


def transitions(recording: Recording, start: int = 0, chunk: Frames | None = None) -> Iterator[Transition]:
    """Rebuild every transition, from step ``start`` on, exactly as SB3's off-policy algorithms store it.

    Like SB3's image wrappers, this yields channels-first views of channels-last memory, so that copying them into a
    buffer takes as long as in training. ``infos`` has only the key that buffers read, ``TimeLimit.truncated``.
    """
    frames = recording.frames(start, chunk)
    last_frames = iter(recording.last_frames[recording.dones[:start].sum() :])
    newest = next(frames)
    stacked = np.zeros((*newest.shape[:-1], newest.shape[-1] * recording.stack), newest.dtype)
    stacked[..., -newest.shape[-1] :] = newest

    for step, newest in enumerate(frames, start):
        channels = newest.shape[-1]
        done = recording.dones[step]
        following = np.concatenate((stacked[..., channels:], newest), axis=-1)
        terminal = following.copy()
        for env in np.flatnonzero(done):
            terminal[env, ..., -channels:] = next(last_frames)
            following[env, ..., :-channels] = 0
        yield Transition(
            recording.present(stacked),
            recording.present(terminal),
            recording.actions[step],
            recording.rewards[step],
            done,
            [{"TimeLimit.truncated": bool(truncated)} for truncated in recording.truncated[step]],
        )
        stacked = following


def _read(path: Path, name: str, steps: int, n_envs: int) -> Recording:
    with zipfile.ZipFile(path) as archive, archive.open("frames_00000.npy") as member:
        (_, _, *frame_shape), dtype = _read_header(member)
    stack = ENVIRONMENTS[name].stack
    with np.load(path) as arrays:
        dones = arrays["dones"][:steps]
        keys = dict(zip(arrays["keys"].tolist(), arrays["widths"].tolist(), strict=True)) if "keys" in arrays else {}
        return Recording(
            name=name,
            path=path,
            steps=steps,
            n_envs=n_envs,
            stack=stack,
            action_space=_action_space(arrays),
            observation_space=_observation_space(frame_shape, dtype, stack, keys),
            frame_shape=tuple(frame_shape),
            actions=arrays["actions"][:steps],
            rewards=arrays["rewards"][:steps],
            dones=dones,
            truncated=arrays["truncated"][:steps],
            last_frames=arrays["last_frames"][: dones.sum()],
        )


def _action_space(arrays: Any) -> gym.spaces.Discrete | gym.spaces.Box:
    if "n_actions" in arrays:
        return gym.spaces.Discrete(int(arrays["n_actions"]))
    actions = arrays["actions"]
    return gym.spaces.Box(-1, 1, actions.shape[2:], actions.dtype.type)


def _observation_space(
    frame_shape: list[int], dtype: np.dtype[Any], stack: int, keys: dict[str, int]
) -> gym.spaces.Box | gym.spaces.Dict:
    *picture, channels = frame_shape
    low, high = (0, 255) if dtype == np.uint8 else (-np.inf, np.inf)
    if keys:
        return gym.spaces.Dict({key: gym.spaces.Box(low, high, (width,), dtype.type) for key, width in keys.items()})
    return gym.spaces.Box(low, high, (channels * stack, *picture), dtype.type)


def _noise(steps: int, n_envs: int) -> Noise:
    """Noise of the size of an Atari observation, in episodes of 500 steps."""
    dones = np.zeros((steps, n_envs), np.bool_)
    dones[499::500] = True
    rng = np.random.default_rng(SEED)
    return Noise(
        name=NOISE,
        path=Path(),
        steps=steps,
        n_envs=n_envs,
        stack=1,
        action_space=gym.spaces.Discrete(4),
        observation_space=gym.spaces.Box(0, 255, (ATARI_STACK, 84, 84), np.uint8),
        frame_shape=(84, 84, ATARI_STACK),
        actions=rng.integers(4, size=(steps, n_envs)),
        rewards=np.zeros((steps, n_envs), np.float32),
        dones=dones,
        truncated=np.zeros_like(dones),
        last_frames=rng.integers(256, size=(int(dones.sum()), 84, 84, ATARI_STACK), dtype=np.uint8),
    )


def _read_into(memory: Frames, archive: zipfile.ZipFile, name: str) -> Frames:
    """Unpack an array into the beginning of ``memory``."""
    with archive.open(name) as member:
        shape, _ = _read_header(member)
        array = memory[: shape[0]]
        flat = array.reshape(-1).view(np.uint8)
        for at in range(0, flat.size, READ_BYTES):
            part = member.read(min(READ_BYTES, flat.size - at))
            flat[at : at + len(part)] = np.frombuffer(part, np.uint8)
    return array


def _read_header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    np.lib.format.read_magic(member)
    shape, _, dtype = np.lib.format.read_array_header_1_0(member)
    return shape, dtype


def channels_first(images: Frames) -> Frames:
    return images.transpose(0, 3, 1, 2) if images.ndim == 4 else images  # vectors stay as they are


def channels_last(images: Frames) -> Frames:
    return images.transpose(0, 2, 3, 1) if images.ndim == 4 else images


def main() -> None:
    parser = argparse.ArgumentParser(description="Record environments into the benchmarks' cache.")
    parser.add_argument("--names", default="mspacman,pong,breakout", help=f"some of {', '.join(ENVIRONMENTS)}")
    parser.add_argument("--steps", type=int, default=25_000, help="steps of each environment (default: %(default)s)")
    parser.add_argument("--n-envs", type=int, default=4, help="environments played at once (default: %(default)s)")
    parser.add_argument(
        "--check", type=int, default=0, metavar="STEPS", help="compare this many steps with the environment"
    )
    arguments = parser.parse_args()

    from benchmarks import recorder

    for name in arguments.names.split(","):
        if recorder.is_played_elsewhere(name):
            recorder.play_elsewhere(name, arguments.steps, arguments.n_envs, arguments.check)
            continue
        recording = load_recording(name, arguments.steps, arguments.n_envs)
        transition_count = recording.steps * recording.n_envs
        print(f"{name}: {transition_count:,} transitions, {recording.path.stat().st_size / 1e6:.1f} MB on disk")
        if arguments.check and not ENVIRONMENTS[name].is_repeatable:
            print(f"{name}: not checked, because the same seed does not reproduce the observations")
        elif arguments.check:
            recorder.check(recording, min(arguments.check, recording.steps))


if __name__ == "__main__":
    main()
