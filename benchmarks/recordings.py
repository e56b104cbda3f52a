"""Real environments, recorded once and played back as SB3 hands them to a replay buffer.

A recording keeps the newest frame of every observation, not the whole stack: 100,000 Atari transitions are 0.7 GB
instead of 5.6 GB, and some tens of megabytes on disk. :func:`transitions` rebuilds the stacks, bit for bit, reading
a few hundred frames at a time, so that playing a recording hardly adds to the memory of the process that measures.

    python -m benchmarks.recordings --names mspacman,pong --steps 25000

records what is not in the cache yet; ``--check`` plays the real environment again and compares.
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
from stable_baselines3.common.vec_env import VecEnv
from tqdm import tqdm

from benchmarks.environments import ATARI, ATARI_STACK, NAMES, NOISE, make_env

CACHE = Path(__file__).parent / ".cache"
SEED = 0
CHUNK_STEPS = 256
READ_BYTES = 1 << 16

Frames = npt.NDArray[Any]
"""Pictures, channels last, or vectors, of all environments."""


class Transition(NamedTuple):
    """The arguments of ``ReplayBuffer.add``, one row per environment."""

    obs: Frames
    next_obs: Frames
    action: npt.NDArray[np.int64]
    reward: npt.NDArray[np.float32]
    done: npt.NDArray[np.bool_]
    infos: list[dict[str, Any]]


@dataclass(frozen=True)
class Recording:
    """What a uniformly random policy met in ``steps`` steps of ``n_envs`` environments."""

    name: str
    path: Path
    steps: int
    n_envs: int
    stack: int
    action_space: gym.spaces.Discrete
    observation_space: gym.spaces.Box
    actions: npt.NDArray[np.int64]
    rewards: npt.NDArray[np.float32]
    dones: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    last_frames: Frames
    """The last frame of each episode, in the order of ``np.nonzero(dones)``."""

    def new_chunk(self) -> Frames:
        """Memory for :meth:`frames`."""
        channels, *picture = self.observation_space.shape
        return np.empty((CHUNK_STEPS, self.n_envs, *picture, channels // self.stack), self.observation_space.dtype)

    def frames(self, start: int = 0, chunk: Frames | None = None) -> Iterator[Frames]:
        """Yield the newest frame of every environment, from step ``start`` on, with one more at the end.

        What it yields is overwritten later: chunks are unpacked into the same memory, ``chunk`` if given, so that
        playing a recording does not add to the memory of a process that measures.
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
    """Observations of random bytes, each of them new: nothing can be shared and nothing compressed."""

    def frames(self, start: int = 0, chunk: Frames | None = None) -> Iterator[Frames]:
        rng = np.random.default_rng(start)
        channels, *picture = self.observation_space.shape
        for _ in range(self.steps - start + 1):
            yield rng.integers(256, size=(self.n_envs, *picture, channels), dtype=np.uint8)


def load_recording(name: str, steps: int, n_envs: int = 4) -> Recording:
    """Load ``steps`` steps of a recording, which is made now where no cached one is long enough."""
    if name == NOISE:
        return _noise(steps, n_envs)
    for path in sorted(CACHE.glob(f"{name}-{n_envs}x*.npz")):
        if int(path.stem.split("x")[-1]) >= steps:
            return _read(path, name, steps, n_envs)
    return _read(record(name, steps, n_envs), name, steps, n_envs)


def transitions(recording: Recording, start: int = 0, chunk: Frames | None = None) -> Iterator[Transition]:
    """Rebuild every transition, from step ``start`` on, exactly as SB3's off-policy algorithms store it.

    Like SB3's image pipeline, this hands out channel-first views of channel-last memory: a copy into a buffer costs
    what it costs in training. ``infos`` has only what buffers read, ``TimeLimit.truncated``.
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
            _channel_first(stacked),
            _channel_first(terminal),
            recording.actions[step],
            recording.rewards[step],
            done,
            [{"TimeLimit.truncated": bool(truncated)} for truncated in recording.truncated[step]],
        )
        stacked = following


def play(env: VecEnv, steps: int, seed: int = SEED) -> Iterator[Transition]:
    """Play at random and yield what SB3 stores: ``next_obs`` is the terminal observation where an episode ends."""
    # Not above: a process that measures another library on a recording has none of this one.
    from sb3_extra_buffers.measure.transitions import collect

    for transition in collect(env, steps, seed):
        yield Transition(*transition)


def record(name: str, steps: int, n_envs: int = 4) -> Path:
    """Play ``steps`` steps and write them to the cache."""
    env = make_env(name, n_envs, SEED)
    channels = env.observation_space.shape[0] // _stack(name)  # type: ignore[index]  # Box spaces have a shape
    actions, rewards, dones, truncated = [], [], [], []
    last_frames: list[Frames] = []
    chunk: list[Frames] = []

    CACHE.mkdir(exist_ok=True)
    path = CACHE / f"{name}-{n_envs}x{steps}.npz"
    unfinished = path.with_suffix(".unfinished")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED, compresslevel=3) as archive:
        # One step more than asked for: its observations are the successors of the last transition.
        for step, transition in enumerate(tqdm(play(env, steps + 1), name, total=steps + 1, unit="step")):
            chunk.append(_channel_last(transition.obs)[..., -channels:].copy())
            if len(chunk) == CHUNK_STEPS or step == steps:
                _write(archive, f"frames_{step // CHUNK_STEPS:05}", np.stack(chunk))
                chunk.clear()
            if step < steps:
                actions.append(transition.action)
                rewards.append(transition.reward)
                dones.append(transition.done)
                truncated.append([info["TimeLimit.truncated"] for info in transition.infos])
                last_frames.extend(_channel_last(transition.next_obs)[transition.done, ..., -channels:])
        _write(archive, "actions", np.array(actions))
        _write(archive, "rewards", np.array(rewards))
        _write(archive, "dones", np.array(dones))
        _write(archive, "truncated", np.array(truncated))
        _write(archive, "last_frames", np.array(last_frames, env.observation_space.dtype))
        _write(archive, "n_actions", np.array(env.action_space.n))  # type: ignore[attr-defined]  # play() checked it
    env.close()
    return unfinished.replace(path)


def check(recording: Recording, steps: int) -> None:
    """Compare the first ``steps`` rebuilt transitions with the real environment's; raise where they differ."""
    env = make_env(recording.name, recording.n_envs, SEED)
    pairs = zip(play(env, steps), transitions(recording), strict=False)
    for step, (real, rebuilt) in enumerate(tqdm(pairs, f"checking {recording.name}", total=steps, unit="step")):
        for field in ("obs", "next_obs", "action", "reward", "done"):
            one, other = getattr(real, field), getattr(rebuilt, field)
            if one.dtype != other.dtype or _layout(one) != _layout(other) or not np.array_equal(one, other):
                raise AssertionError(f"{recording.name}: {field} of step {step} is not what the environment gave")
        if [info["TimeLimit.truncated"] for info in real.infos] != [i["TimeLimit.truncated"] for i in rebuilt.infos]:
            raise AssertionError(f"{recording.name}: infos of step {step} are not what the environment gave")
    env.close()


def _read(path: Path, name: str, steps: int, n_envs: int) -> Recording:
    with zipfile.ZipFile(path) as archive, archive.open("frames_00000.npy") as member:
        (_, _, *frame_shape), dtype = _read_header(member)
    with np.load(path) as arrays:
        dones = arrays["dones"][:steps]
        return Recording(
            name=name,
            path=path,
            steps=steps,
            n_envs=n_envs,
            stack=_stack(name),
            action_space=gym.spaces.Discrete(int(arrays["n_actions"])),
            observation_space=_observation_space(frame_shape, dtype, _stack(name)),
            actions=arrays["actions"][:steps],
            rewards=arrays["rewards"][:steps],
            dones=dones,
            truncated=arrays["truncated"][:steps],
            last_frames=arrays["last_frames"][: dones.sum()],
        )


def _observation_space(frame_shape: list[int], dtype: np.dtype[Any], stack: int) -> gym.spaces.Box:
    *picture, channels = frame_shape
    low, high = (0, 255) if dtype == np.uint8 else (-np.inf, np.inf)
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
        actions=rng.integers(4, size=(steps, n_envs)),
        rewards=np.zeros((steps, n_envs), np.float32),
        dones=dones,
        truncated=np.zeros_like(dones),
        last_frames=rng.integers(256, size=(int(dones.sum()), 84, 84, ATARI_STACK), dtype=np.uint8),
    )


def _stack(name: str) -> int:
    return ATARI_STACK if name in ATARI else 1


def _write(archive: zipfile.ZipFile, name: str, array: npt.NDArray[Any]) -> None:
    with archive.open(f"{name}.npy", "w") as member:
        np.lib.format.write_array(member, array)


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


def _layout(array: npt.NDArray[Any]) -> list[int]:
    return [stride for stride, length in zip(array.strides, array.shape, strict=True) if length > 1]


def _channel_first(images: Frames) -> Frames:
    return images.transpose(0, 3, 1, 2) if images.ndim == 4 else images  # vectors stay as they are


def _channel_last(images: Frames) -> Frames:
    return images.transpose(0, 2, 3, 1) if images.ndim == 4 else images


def main() -> None:
    parser = argparse.ArgumentParser(description="Record environments into the benchmarks' cache.")
    parser.add_argument("--names", default=",".join(ATARI), help=f"comma-separated, of {','.join(NAMES)}")
    parser.add_argument("--steps", type=int, default=25_000, help="steps of each environment (default: %(default)s)")
    parser.add_argument("--n-envs", type=int, default=4, help="environments played at once (default: %(default)s)")
    parser.add_argument("--check", type=int, default=0, metavar="STEPS", help="compare so many with the environment")
    arguments = parser.parse_args()

    for name in arguments.names.split(","):
        recording = load_recording(name, arguments.steps, arguments.n_envs)
        transition_count = recording.steps * recording.n_envs
        print(f"{name}: {transition_count:,} transitions, {recording.path.stat().st_size / 1e6:.1f} MB on disk")
        if arguments.check:
            check(recording, min(arguments.check, recording.steps))


if __name__ == "__main__":
    main()
