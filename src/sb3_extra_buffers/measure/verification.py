"""Store the same transitions in SB3's buffer and in ours, and compare everything that can be read from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces

from sb3_extra_buffers.errors import MismatchError
from sb3_extra_buffers.measure.buffers import SB3, buffer_arguments, buffer_class, make_replay_buffer
from sb3_extra_buffers.measure.transitions import Transition

Array = npt.NDArray[Any]

OBSERVATIONS = ("observations", "next_observations")
STORED = (*OBSERVATIONS, "actions", "rewards", "dones", "timeouts")
BATCH_SIZE = 64
SAMPLES = 200
"""How often a replay buffer is sampled from."""
EPOCHS = 2
"""How often each rollout is read, as PPO does."""
_SLOTS_AT_ONCE = 64


class Pair(NamedTuple):
    """Two buffers that should hold the same."""

    theirs: Any
    ours: Any


@dataclass
class Tally:
    """What was compared and found identical."""

    observations: int = 0
    batches: int = 0
    fills: int = 0
    """How often the buffers were filled completely."""


def replay_pair(
    size: int, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], n_envs: int, method: str = "auto"
) -> Pair:
    """Replay buffers for ``size`` transitions, counted over all environments."""
    arguments = (size, observation_space, action_space, n_envs)
    return Pair(make_replay_buffer(SB3, *arguments), make_replay_buffer(method, *arguments))


def rollout_pair(
    steps: int, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], n_envs: int, method: str = "auto"
) -> Pair:
    """Buffers for rollouts of ``steps`` steps."""
    arguments = (steps, observation_space, action_space, "cpu", 0.95, 0.99, n_envs)
    theirs, ours = (buffer_class("Rollout", observation_space, compressed) for compressed in (False, True))
    return Pair(theirs(*arguments), ours(*arguments, **buffer_arguments(method)))


class ReplayVerification:
    """Adds every transition to both buffers. Compares batches often, and everything stored whenever they are full."""

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
            self._compare_stored()

    def finish(self) -> Tally:
        self._compare_batches()
        self._compare_stored()
        return self.tally

    def _compare_batches(self) -> None:
        theirs, ours = (_seeded(self._seed + self._step, buffer.sample, BATCH_SIZE)._asdict() for buffer in self.pair)
        try:
            _compare(theirs, ours, lambda row: f"row {row} of a batch drawn after step {self._step}", self.tally)
        except MismatchError:
            self._compare_stored()  # if the stored data is wrong, this error is more precise
            raise
        self.tally.batches += 1

    def _compare_stored(self) -> None:
        theirs, ours = self.pair
        ours.check()
        if (theirs.pos, theirs.full) != (ours.pos, ours.full):
            raise MismatchError(f"After step {self._step}, SB3's buffer is at slot {theirs.pos}, ours at {ours.pos}.")
        for start in range(0, theirs.size(), _SLOTS_AT_ONCE):
            slots = slice(start, min(start + _SLOTS_AT_ONCE, theirs.size()))
            expected, actual = ({name: _rows(getattr(buffer, name), slots) for name in STORED} for buffer in self.pair)
            _compare(expected, actual, partial(self._where, start), self.tally)

    def _where(self, start: int, row: int) -> str:
        slot, env = divmod(row, self.pair.theirs.n_envs)
        slot += start
        age = (self._step - 1 - slot) % self.pair.theirs.buffer_size
        return f"slot {slot} of environment {env}, added at step {self._step - age} of {self._step}"


class RolloutVerification:
    """Adds every step to both buffers. Compares every batch of every rollout."""

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
        # Random values and log-probabilities will do: buffers only store them.
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
            self.pair.ours.check()
            for buffer in self.pair:
                buffer.reset()

    def finish(self) -> Tally:
        self.pair.ours.check()
        return self.tally

    def _compare_rollout(self, seed: int) -> None:
        order = _seeded(seed, np.random.permutation, self.pair.theirs.buffer_size * self.pair.theirs.n_envs)
        batches = (_seeded(seed, lambda buffer: list(buffer.get(BATCH_SIZE)), buffer) for buffer in self.pair)

        for number, (theirs, ours) in enumerate(zip(*batches, strict=True)):
            rows = order[number * BATCH_SIZE :]
            _compare(theirs._asdict(), ours._asdict(), partial(self._where, rows), self.tally)
            self.tally.batches += 1

    def _where(self, rows: npt.NDArray[np.int64], row: int) -> str:
        size = self.pair.theirs.buffer_size
        env, slot = divmod(int(rows[row]), size)
        added = self._step - size + slot + 1
        return f"slot {slot} of environment {env}, added at step {added} of {self._step}"


def first_difference(expected: Array, actual: Array) -> int | None:
    """The first row that differs in any bit, so that NaN equals itself and ``-0.0`` is not ``0.0``."""
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        raise MismatchError(
            f"SB3's buffer returns {expected.dtype} {expected.shape}, ours {actual.dtype} {actual.shape}."
        )
    if not expected.size:
        return None
    theirs, ours = (np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8) for array in (expected, actual))
    differing = (theirs != ours).any(axis=1)
    return int(differing.argmax()) if differing.any() else None


def _compare(theirs: Mapping[str, Any], ours: Mapping[str, Any], where: Callable[[int], str], tally: Tally) -> None:
    """Compare fields of many rows; ``where`` says where a row comes from."""
    for name, expected_field in theirs.items():
        for key, expected, actual in _arrays(expected_field, ours[name]):
            row = first_difference(expected, actual)
            if row is not None:
                field = f"{name}[{key!r}]" if key else name
                raise _mismatch(field, where(row), expected[row], actual[row])
            tally.observations += len(expected) if name in OBSERVATIONS else 0


def _arrays(expected: Any, actual: Any) -> Iterator[tuple[str, Array, Array]]:
    """The arrays of a field, with their keys if it is a Dict."""
    if isinstance(expected, Mapping):
        for key in expected:
            yield key, np.asarray(expected[key]), np.asarray(actual[key])
    elif expected is not None or actual is not None:  # a batch may have no discounts
        yield "", np.asarray(expected), np.asarray(actual)


def _rows(field: Any, slots: slice) -> Any:
    """Slots and environments of a stored field as one axis."""
    if isinstance(field, Mapping):
        return {key: _rows(part, slots) for key, part in field.items()}
    array = np.asarray(field[slots])
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _mismatch(field: str, where: str, expected: Array, actual: Array) -> MismatchError:
    flat = [np.atleast_1d(array).reshape(-1) for array in (expected, actual)]
    place = first_difference(*flat) or 0
    return MismatchError(
        f"{field} differs from SB3's at {where}: value {place} of {flat[0].size} is {flat[1][place]}, "
        f"not {flat[0][place]}. Please report it."
    )


def _seeded(seed: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call with NumPy's global generator seeded, and restore its state."""
    state = np.random.get_state()
    np.random.seed(seed % (1 << 32))
    try:
        return function(*arguments)
    finally:
        np.random.set_state(state)
