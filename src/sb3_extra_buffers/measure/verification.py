"""The same play through SB3's buffer and ours, with everything compared that comes out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import (
    BaseBuffer,
    DictReplayBuffer,
    DictRolloutBuffer,
    ReplayBuffer,
    RolloutBuffer,
)

from sb3_extra_buffers.compressed import (
    CompressedDictReplayBuffer,
    CompressedDictRolloutBuffer,
    CompressedReplayBuffer,
    CompressedRolloutBuffer,
)
from sb3_extra_buffers.errors import MismatchError
from sb3_extra_buffers.measure.playing import Transition

Array = npt.NDArray[Any]

FIELDS = ("actions", "rewards", "dones", "timeouts")
OBSERVATIONS = ("observations", "next_observations")
BATCH_SIZE = 64
SAMPLES = 200
"""Moments of a play at which replay buffers are sampled from."""
EPOCHS = 2
"""How often each rollout is read, as PPO reads it."""
_SLOTS_AT_ONCE = 64


class Pair(NamedTuple):
    """Two buffers that are to hold the same."""

    theirs: Any
    ours: Any


@dataclass
class Tally:
    """What was compared, all of it identical."""

    observations: int = 0
    batches: int = 0
    fills: int = 0
    """How often a buffer was filled from its beginning to its end."""


def replay_pair(
    size: int, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], n_envs: int, **options: Any
) -> Pair:
    """Replay buffers for ``size`` transitions, those of all environments together."""
    is_dict = isinstance(observation_space, spaces.Dict)
    arguments: tuple[Any, ...] = (size, observation_space, action_space, "cpu", n_envs)
    return Pair(
        (DictReplayBuffer if is_dict else ReplayBuffer)(*arguments),
        (CompressedDictReplayBuffer if is_dict else CompressedReplayBuffer)(*arguments, **options),
    )


def rollout_pair(
    steps: int, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], n_envs: int, **options: Any
) -> Pair:
    """Buffers for rollouts of ``steps`` steps."""
    is_dict = isinstance(observation_space, spaces.Dict)
    arguments: tuple[Any, ...] = (steps, observation_space, action_space, "cpu", 0.95, 0.99, n_envs)
    return Pair(
        (DictRolloutBuffer if is_dict else RolloutBuffer)(*arguments),
        (CompressedDictRolloutBuffer if is_dict else CompressedRolloutBuffer)(*arguments, **options),
    )


class ReplayVerification:
    """Give both buffers every transition; compare batches often, and everything whenever they have been filled."""

    def __init__(self, pair: Pair, steps: int, seed: int) -> None:
        self.pair = pair
        self.tally = Tally()
        self._every = max(1, steps // SAMPLES)
        self._seed = seed
        self._step = 0

    def add(self, transition: Transition) -> None:
        for buffer in self.pair:
            buffer.add(*transition)
        self._step += 1
        if self._step % self._every == 0:
            self._compare_batches()
        if self.pair.theirs.pos == 0:
            self.tally.fills += 1
            self._compare_everything()

    def finish(self) -> Tally:
        self._compare_batches()
        self._compare_everything()
        return self.tally

    def _compare_batches(self) -> None:
        theirs, ours = (_seeded(self._seed + self._step, buffer.sample, BATCH_SIZE) for buffer in self.pair)
        for name in theirs._fields:
            for key, expected, actual in _parts(getattr(theirs, name), getattr(ours, name)):
                row = first_difference(expected, actual)
                if row is not None:
                    self._compare_everything()  # which says more, if what is stored is wrong
                    where = f"row {row} of a batch drawn after step {self._step}"
                    raise mismatch(name, key, where, expected[row], actual[row])
                self.tally.observations += BATCH_SIZE if name in OBSERVATIONS else 0
        self.tally.batches += 1

    def _compare_everything(self) -> None:
        theirs, ours = self.pair
        check(ours)
        if (theirs.pos, theirs.full) != (ours.pos, ours.full):
            raise MismatchError(f"After step {self._step}, SB3's buffer is at slot {theirs.pos}, ours at {ours.pos}.")
        size = theirs.size()
        for start in range(0, size, _SLOTS_AT_ONCE):
            slots = slice(start, min(start + _SLOTS_AT_ONCE, size))
            for name in (*OBSERVATIONS, *FIELDS):
                for key, expected, actual in _parts(getattr(theirs, name), getattr(ours, name), slots):
                    self._compare_slots(name, key, start, expected, actual)
                    self.tally.observations += expected.shape[0] * expected.shape[1] if name in OBSERVATIONS else 0

    def _compare_slots(self, name: str, key: str, start: int, expected: Array, actual: Array) -> None:
        n_envs = self.pair.theirs.n_envs
        flat = [array.reshape(len(array) * n_envs, *array.shape[2:]) for array in (expected, actual)]
        place = first_difference(*flat)
        if place is None:
            return
        row, env = divmod(place, n_envs)
        slot, size = start + row, self.pair.theirs.buffer_size
        added = self._step - 1 - (self._step - 1 - slot) % size
        where = f"slot {slot} of environment {env}, added at step {added + 1} of {self._step}"
        raise mismatch(name, key, where, flat[0][place], flat[1][place])


class RolloutVerification:
    """Give both buffers every step; compare every batch of every rollout."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair = pair
        self.tally = Tally()
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._starts = np.ones(pair.theirs.n_envs, dtype=bool)
        self._step = 0
        for buffer in pair:
            buffer.reset()

    def add(self, transition: Transition) -> None:
        # Values and log-probabilities are any numbers: no policy is needed to compare buffers.
        value, log_prob = th.from_numpy(self._rng.standard_normal((2, len(self._starts)), dtype=np.float32))
        for buffer in self.pair:
            buffer.add(transition.obs, transition.action, transition.reward, self._starts, value, log_prob)
        self._starts = np.asarray(transition.done, dtype=bool)
        self._step += 1
        if self.pair.theirs.full:
            for buffer in self.pair:
                buffer.compute_returns_and_advantage(value, self._starts)
            for epoch in range(EPOCHS):
                self._compare_rollout(self._seed + self._step * EPOCHS + epoch)
            self.tally.fills += 1
            check(self.pair.ours)
            for buffer in self.pair:
                buffer.reset()

    def finish(self) -> Tally:
        check(self.pair.ours)
        return self.tally

    def _compare_rollout(self, seed: int) -> None:
        size = self.pair.theirs.buffer_size
        order = _seeded(seed, np.random.permutation, size * self.pair.theirs.n_envs)
        all_theirs, all_ours = (_seeded(seed, _all_batches, buffer) for buffer in self.pair)
        for number, (theirs, ours) in enumerate(zip(all_theirs, all_ours, strict=True)):
            for name in theirs._fields:
                for key, expected, actual in _parts(getattr(theirs, name), getattr(ours, name)):
                    row = first_difference(expected, actual)
                    if row is not None:
                        env, slot = divmod(int(order[number * BATCH_SIZE + row]), size)
                        added = self._step - size + slot + 1
                        where = f"slot {slot} of environment {env}, added at step {added} of {self._step}"
                        raise mismatch(name, key, where, expected[row], actual[row])
                    self.tally.observations += len(expected) if name in OBSERVATIONS else 0
            self.tally.batches += 1


def first_difference(expected: Array, actual: Array) -> int | None:
    """The first row that is not the same to the last bit, NaN and the sign of zero included."""
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        raise MismatchError(
            f"SB3's buffer gives {expected.dtype} {expected.shape}, ours {actual.dtype} {actual.shape}."
        )
    if not expected.size:
        return None
    theirs, ours = (np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8) for array in (expected, actual))
    differing = (theirs != ours).any(axis=1)
    return int(differing.argmax()) if differing.any() else None


def mismatch(name: str, key: str, where: str, expected: Array, actual: Array) -> MismatchError:
    """An error that says what differs, where, and how the first value of it does."""
    flat = [np.atleast_1d(array).reshape(-1) for array in (expected, actual)]
    place = first_difference(*flat) or 0
    what = f"{name}[{key!r}]" if key else name
    return MismatchError(
        f"{what} differs from SB3's at {where}: value {place} of {flat[0].size} is {flat[1][place]}, "
        f"not {flat[0][place]}. Please report it."
    )


def check(buffer: BaseBuffer) -> None:
    """Check a buffer's own invariants, if it can."""
    checking: Callable[[], None] | None = getattr(buffer, "check", None)
    if checking is not None:
        checking()


def _parts(expected: Any, actual: Any, key: Any = slice(None)) -> Iterator[tuple[str, Array, Array]]:
    """Arrays to compare, each with the key that it has in a Dict space."""
    if expected is None and actual is None:  # the discounts of a batch
        return
    if isinstance(expected, dict):
        for name in expected:
            yield name, np.asarray(expected[name][key]), np.asarray(actual[name][key])
    else:
        yield "", np.asarray(expected[key]), np.asarray(actual[key])


def _seeded(seed: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call with NumPy's generator seeded, and leave the generator as it was."""
    state = np.random.get_state()
    np.random.seed(seed % (1 << 32))
    try:
        return function(*arguments)
    finally:
        np.random.set_state(state)


def _all_batches(buffer: RolloutBuffer) -> list[Any]:
    return list(buffer.get(BATCH_SIZE))
