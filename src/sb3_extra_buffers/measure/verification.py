"""Store the same transitions in SB3's buffer and in ours, and compare all values that they return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th

from sb3_extra_buffers.compressed.rows import map_parts
from sb3_extra_buffers.errors import MismatchError
from sb3_extra_buffers.measure.buffers import SB3, Task
from sb3_extra_buffers.measure.transitions import Transition

Array = npt.NDArray[Any]

OBSERVATIONS = ("observations", "next_observations")
STORED = (*OBSERVATIONS, "actions", "rewards", "dones", "timeouts")
BATCH_SIZE = 64
SAMPLES = 200
"""Number of batches drawn from a replay buffer."""
EPOCHS = 2
"""Passes over each rollout, as in PPO."""
_SLOTS_AT_ONCE = 64
"""Slots that are compared together, so that few observations are decompressed at a time."""


@dataclass
class Tally:
    """How much was compared and found identical."""

    observations: int = 0
    batches: int = 0
    fills: int = 0
    """How many times the buffers became full."""


class Verification:
    """Adds every transition to SB3's buffer and to ours, and compares the buffers.

    It compares batches of replay buffers at regular intervals, and their whole contents each time they are full. It
    compares every batch of every rollout.

    :param size: Transitions in each buffer, over all environments.
    :param steps: How many steps of all environments will be added.
    :raises MismatchError: from all methods, at the first difference.
    """

    def __init__(self, task: Task, method: str, size: int, steps: int, seed: int) -> None:
        self.task = task
        self.theirs, self.ours = task.make(SB3, size), task.make(method, size)
        self.tally = Tally()
        self._compare_every = max(1, steps // SAMPLES)
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._step = 0

    def add(self, transition: Transition) -> None:
        value = th.from_numpy(self._rng.standard_normal(self.task.n_envs, dtype=np.float32))
        for buffer in (self.theirs, self.ours):
            self.task.add(buffer, transition, value)
        self._step += 1
        if self.task.kind == "Rollout":
            if self.theirs.full:
                self.tally.fills += 1
                self._compare_rollout(value, np.asarray(transition.done))
            return
        if self._step % self._compare_every == 0:
            self._compare_batch()
        if self.theirs.pos == 0:
            self.tally.fills += 1
            self._compare_stored()

    def finish(self) -> Tally:
        if self.task.kind == "Replay":
            self._compare_batch()
            self._compare_stored()
        self.ours.check()
        return self.tally

    def _compare_batch(self) -> None:
        seed = self._seed + self._step
        theirs, ours = (_seeded(seed, buffer.sample, BATCH_SIZE)._asdict() for buffer in (self.theirs, self.ours))
        try:
            _compare(theirs, ours, lambda row: f"row {row} of a batch drawn after step {self._step}", self.tally)
        except MismatchError:
            self._compare_stored()  # if the stored data is wrong, this raises a more precise error
            raise
        self.tally.batches += 1

    def _compare_stored(self) -> None:
        theirs, ours = self.theirs, self.ours
        ours.check()
        if (theirs.pos, theirs.full) != (ours.pos, ours.full):
            raise MismatchError(f"After step {self._step}, SB3's buffer is at slot {theirs.pos}, ours at {ours.pos}.")
        for start in range(0, theirs.size(), _SLOTS_AT_ONCE):
            slots = slice(start, min(start + _SLOTS_AT_ONCE, theirs.size()))
            expected, actual = (
                {name: _rows(getattr(buffer, name), slots) for name in STORED} for buffer in (theirs, ours)
            )
            places = np.argwhere(np.ones((slots.stop - start, self.task.n_envs))) + np.array([start, 0])
            _compare(expected, actual, partial(self._where, places), self.tally)

    def _compare_rollout(self, value: th.Tensor, dones: Array) -> None:
        size, n_envs = self.theirs.buffer_size, self.task.n_envs
        for buffer in (self.theirs, self.ours):
            buffer.compute_returns_and_advantage(value, dones)
        for epoch in range(EPOCHS):
            seed = self._seed + self._step * EPOCHS + epoch
            rows = _seeded(seed, np.random.permutation, size * n_envs)
            batches = (_seeded(seed, list, buffer.get(BATCH_SIZE)) for buffer in (self.theirs, self.ours))
            for theirs, ours in zip(*batches, strict=True):
                batch_rows, rows = rows[:BATCH_SIZE], rows[BATCH_SIZE:]
                places = np.stack([batch_rows % size, batch_rows // size], axis=1)
                _compare(theirs._asdict(), ours._asdict(), partial(self._where, places), self.tally)
                self.tally.batches += 1
        self.ours.check()

    def _where(self, places: npt.NDArray[np.int64], row: int) -> str:
        slot, env = places[row].tolist()
        age = (self._step - 1 - slot) % self.theirs.buffer_size
        return f"slot {slot} of environment {env}, added at step {self._step - age} of {self._step}"


def first_difference(expected: Array, actual: Array) -> int | None:
    """The first row that differs in any bit: NaN equals itself, but ``-0.0`` is not ``0.0``."""
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
    """Compare all fields of a batch. ``where`` describes the origin of a row for the error message."""
    for name, expected_field in theirs.items():
        for key, expected, actual in _arrays(expected_field, ours[name]):
            row = first_difference(expected, actual)
            if row is not None:
                field = f"{name}[{key!r}]" if key else name
                raise _mismatch(field, where(row), expected[row], actual[row])
            tally.observations += len(expected) if name in OBSERVATIONS else 0


def _arrays(expected: Any, actual: Any) -> Iterator[tuple[str, Array, Array]]:
    """The two arrays of each key of a Dict field; for another field, with an empty key."""
    if isinstance(expected, Mapping):
        for key in expected:
            yield key, np.asarray(expected[key]), np.asarray(actual[key])
    elif expected is not None or actual is not None:  # discounts may be None
        yield "", np.asarray(expected), np.asarray(actual)


def _rows(field: Any, slots: slice) -> Any:
    """The given slots of a stored field, with slots and environments flattened into one axis."""
    return map_parts(lambda part: np.concatenate(np.asarray(part[slots])), field)


def _mismatch(field: str, where: str, expected: Array, actual: Array) -> MismatchError:
    flat = [np.atleast_1d(array).reshape(-1) for array in (expected, actual)]
    place = first_difference(*flat) or 0
    return MismatchError(
        f"{field} differs from SB3's at {where}: value {place} of {flat[0].size} is {flat[1][place]}, "
        f"not {flat[0][place]}. Please report it."
    )


def _seeded(seed: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Seed NumPy's global generator, call the function, and restore the generator's state."""
    state = np.random.get_state()
    np.random.seed(seed % (1 << 32))
    try:
        return function(*arguments)
    finally:
        np.random.set_state(state)
