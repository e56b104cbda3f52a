"""Histories of sequence buffers: every sequence is compared with a slice of a plain list of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.histories.models import plain
from tests.histories.plans import Plan
from tests.histories.replay_history import ReplayHistory
from tests.transitions import assert_same


class Step(NamedTuple):
    """A step of one environment."""

    number: int
    """Number of steps before it, including overwritten ones."""
    slot: int
    episode_step: int
    unbroken: int
    """Number of steps before it since the last gap."""
    is_gap: bool
    is_end: bool
    """As known when the step was added."""


class Steps:
    """All stored steps as plain lists. Finds their sequences by brute force."""

    def __init__(self, plan: Plan) -> None:
        self.options, self.n_slots = plan.options, plan.slots
        self.total = sum(self.options[name] for name in ("length", "burn_in", "bootstrap_steps"))
        overlap = self.options["overlap"]
        self.stride = 1 if overlap is None else self.total - overlap
        self.n_added = 0
        self.of_env: list[list[Step]] = [[] for _ in range(plan.n_envs)]
        self.handed_out: set[tuple[int, int]] = set()
        """Sampled sequences of the online queue: the number of the first step, and the environment."""
        self.latents = {
            name: np.zeros((plan.slots, plan.n_envs, *shape), dtype)
            for name, (shape, dtype) in self.options["latents"].items()
        }

    def add(self, slot: int, follows: list[bool], ended: list[bool], ends: list[bool]) -> None:
        for env, steps in enumerate(self.of_env):
            is_gap = not steps or not (follows[env] or ended[env])
            begins = is_gap or ended[env]
            episode_step = 0 if begins else steps[-1].episode_step + 1
            unbroken = 0 if is_gap else steps[-1].unbroken + 1
            steps.append(Step(self.n_added, slot, episode_step, unbroken, is_gap, ends[env]))
            del steps[: -self.n_slots]
        self.n_added += 1

    def window(self, env: int, i: int) -> list[Step]:
        """The steps of the sequence that begins with the i-th one: fewer than ``total`` if it is cut off."""
        steps = self.of_env[env][i : i + self.total]
        crosses = self.options["at_episode_end"] == "cross"
        for n, step in enumerate(steps[1:], 1):
            if step.is_gap if crosses else step.episode_step == 0:
                return steps[:n]
        return steps

    def _is_valid(self, env: int, i: int, window: list[Step]) -> bool:
        if len(window) == self.total:
            return True
        if self.options["at_episode_end"] != "pad":
            return False
        is_closed = i + len(window) < len(self.of_env[env]) or window[-1].is_end
        return is_closed and len(window) > self.options["burn_in"]

    def anchors(self) -> list[tuple[int, int]]:
        """Environment and index of the first step of every sequence, in the buffer's order."""
        crosses = self.options["at_episode_end"] == "cross"
        return [
            (env, i)
            for env, steps in enumerate(self.of_env)
            for i, step in enumerate(steps)
            if (step.number if crosses else step.episode_step) % self.stride == 0
            and self._is_valid(env, i, self.window(env, i))
        ]

    def take_online(self, n: int) -> list[tuple[int, int]]:
        """Take up to ``n`` non-overlapping sequences that were not handed out yet, oldest first."""
        if not self.options.get("online_queue"):
            return []
        crosses = self.options["at_episode_end"] == "cross"
        waiting = [
            (step.number, env, i)
            for env, steps in enumerate(self.of_env)
            for i, step in enumerate(steps)
            if (step.unbroken if crosses else step.episode_step) % self.total == 0
            and (step.number, env) not in self.handed_out
            and self._is_valid(env, i, self.window(env, i))
        ]
        taken = sorted(waiting)[:n]
        self.handed_out |= {(number, env) for number, env, _ in taken}
        return [(env, i) for _, env, i in taken]

    def clear(self) -> None:
        for steps in self.of_env:
            steps.clear()


class SequencePriorities:
    """Priorities of sequences, by the number of the first step and the environment."""

    def __init__(self, alpha: float, beta: float, eta: float) -> None:
        self.alpha, self.beta, self.eta, self.largest = alpha, beta, eta, 1.0
        self.values: dict[tuple[int, int], float] = {}

    def added(self, steps: Steps) -> None:
        numbers = [(steps.of_env[env][i].number, env) for env, i in steps.anchors()]
        self.values = {key: self.values.get(key, self.largest**self.alpha) for key in numbers}

    def update(self, keys: list[tuple[int, int]], errors: Any, mask: Any, epsilon: float) -> None:
        for key, row, valid in zip(keys, np.abs(errors), mask, strict=True):
            if key in self.values:
                chosen = row[valid] if valid.any() else np.zeros(1)
                mixed = self.eta * chosen.max() + (1 - self.eta) * chosen.mean() + epsilon
                self.largest = max(self.largest, mixed)
                self.values[key] = mixed**self.alpha

    def by_place(self, steps: Steps, n_envs: int) -> Any:
        values = np.zeros(steps.n_slots * n_envs)
        slots = {(step.number, env): step.slot for env, part in enumerate(steps.of_env) for step in part}
        for (number, env), value in self.values.items():
            values[slots[number, env] * n_envs + env] = value
        return values


class SequenceHistory(ReplayHistory):
    """The history of any sequence buffer class."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.steps_kept = Steps(plan)
        self.sequence_priorities: SequencePriorities | None = None
        if "Prioritized" in plan.name.buffer:
            self.sequence_priorities = SequencePriorities(*(plan.options[name] for name in ("alpha", "beta", "eta")))
        super().__init__(plan, folder)

    def operations(self) -> dict[Any, float]:
        return {**super().operations(), self.write_stale_latents: 0.5}

    def add(self) -> None:
        step, model, kept = self.next_step(), self.model, self.steps_kept
        slot, previous = self.subject.pos, (self.subject.pos - 1) % self.plan.slots
        latents = {
            name: self.rng.normal(size=(self.plan.n_envs, *shape)).astype(dtype)
            for name, (shape, dtype) in self.plan.options["latents"].items()
            if self.rng.random() < 0.9
        }
        follows = self._follows(step.obs, previous)
        ended = ((model.dones[previous] > 0) | (model.timeouts[previous] > 0)).tolist()
        given = self._as_tensors(latents) if self.plan.name.on_device and self.rng.random() < 0.5 else latents
        self.subject.add(*self.on_device(step), **({"latents": given} if given else {}))
        model.add(*self.copied(step))
        ends = ((model.dones[slot] > 0) | (model.timeouts[slot] > 0)).tolist()
        kept.add(slot, follows, ended, ends)
        for name, array in kept.latents.items():
            array[slot] = latents.get(name, 0)
        if self.sequence_priorities is not None:
            self.sequence_priorities.added(kept)

    def _follows(self, observations: Any, previous: int) -> list[bool]:
        """For each environment, whether these observations equal the previous step's next observations, bit for bit."""
        if not self.plan.options["detect_gaps"]:
            return [True] * self.plan.n_envs
        follows = [True] * self.plan.n_envs
        stored = self.model.next_observations
        for key in stored if self.is_dict else [None]:
            before, now = (stored, observations) if key is None else (stored[key], observations[key])
            for env in range(self.plan.n_envs):
                values = np.asarray(now[env]).astype(before.dtype)
                follows[env] &= before[previous, env].tobytes() == values.tobytes()
        return follows

    def reset(self) -> None:
        super().reset()
        self.steps_kept.clear()
        if self.sequence_priorities is not None:
            self.sequence_priorities.values.clear()

    # Reading

    def sample(self) -> None:
        kept, size = self.steps_kept, int(self.rng.choice([1, 4] if self.plan.path == "kernels" else [1, 8, 16]))
        anchors = kept.anchors()
        assert self.subject.n_sequences == len(anchors)
        if not anchors:
            return
        self._compare_newest(anchors)
        if self.sequence_priorities is not None:
            self._sample_sequences_by_priority(self.sequence_priorities, size)
            return
        expected = kept.take_online(size)
        seed = self.seeded()
        np.random.seed(seed)
        if len(expected) < size:
            ranks = np.random.randint(0, len(anchors), size=size - len(expected))
            expected += [anchors[rank] for rank in ranks.tolist()]
        drawn = np.random.random()
        np.random.seed(seed)
        ours = self.subject.sample(size)
        assert np.random.random() == drawn
        self._compare_windows(ours, [(env, kept.window(env, i)) for env, i in expected])
        self._write_latents(ours)

    def _compare_newest(self, anchors: list[tuple[int, int]]) -> None:
        """Compare the newest sequence of each environment, which is next to the write position and rarely drawn."""
        kept, newest = self.steps_kept, dict(anchors)
        slots = np.array([kept.of_env[env][i].slot for env, i in newest.items()])
        ours = self.subject._sequences_at(slots, np.array(list(newest)), None)
        self._compare_windows(ours, [(env, kept.window(env, i)) for env, i in newest.items()])

    def _sample_sequences_by_priority(self, priorities: SequencePriorities, size: int) -> None:
        kept, n_envs = self.steps_kept, self.plan.n_envs
        seed = self.seeded()
        np.random.seed(seed)
        random = np.random.random_sample(size)
        np.random.seed(seed)
        ours = self.subject.sample(size)
        keys = [divmod(sequence, n_envs) for sequence in ours.sequences.tolist()]
        chosen = [(env, next(i for i, s in enumerate(kept.of_env[env]) if s.number == n)) for n, env in keys]
        values = priorities.by_place(kept, n_envs)
        places = np.array([kept.of_env[env][i].slot * n_envs + env for env, i in chosen])
        edges = np.concatenate([[0.0], np.cumsum(values)])
        heights, slack = (np.arange(size) + random) * edges[-1] / size, 1e-9 * edges[-1]
        assert (edges[places] <= heights + slack).all()
        assert (heights <= edges[places + 1] + slack).all()
        weights = (values[places].min() / values[places]) ** priorities.beta
        np.testing.assert_allclose(plain(ours.weights), weights, rtol=1e-6)
        self._compare_windows(ours, [(env, kept.window(env, i)) for env, i in chosen])
        self._write_latents(ours)
        if self.rng.random() < 0.3:
            self.add_some()
        errors = self.rng.normal(size=ours.mask.shape) * self.rng.choice([0.1, 1, 10])
        mask = plain(ours.mask)
        self.subject.update_priorities(ours.sequences, errors, ours.mask)
        if self.plan.options["time_first"]:
            errors, mask = errors.T, mask.T
        priorities.update(keys, errors, mask, self.subject.epsilon)

    def _compare_windows(self, ours: Any, windows: list[tuple[int, list[Step]]]) -> None:
        model, total = self.model, self.steps_kept.total
        time_first = self.plan.options["time_first"]

        def batch_first(values: Any) -> Any:
            if isinstance(values, dict):
                return {key: batch_first(part) for key, part in values.items()}
            return plain(values).swapaxes(0, 1) if time_first else plain(values)

        def rows(array: Any) -> Any:
            """The values of all windows, padded with zeros."""
            if isinstance(array, dict):
                return {key: rows(part) for key, part in array.items()}
            found = np.zeros((len(windows), total, *array.shape[2:]), array.dtype)
            for row, (env, window) in zip(found, windows, strict=True):
                row[: len(window)] = [array[step.slot, env] for step in window]
            return found

        def flags(flag: Any) -> Any:
            found = np.zeros((len(windows), total), np.bool_)
            for row, (env, window) in zip(found, windows, strict=True):
                row[: len(window)] = [flag(step, env) for step in window]
            return found

        assert_same(batch_first(ours.observations), self.expected(rows(model.observations)))
        if self.plan.options["include_next_observations"]:
            assert_same(batch_first(ours.next_observations), self.expected(rows(model.next_observations)))
        else:
            assert ours.next_observations is None
        for name in ("actions", "rewards"):
            assert_same(batch_first(getattr(ours, name)), rows(getattr(model, name)))
        ended, truncated = model.dones > 0, model.timeouts > 0
        assert_same(batch_first(ours.mask), flags(lambda step, env: True))
        assert_same(batch_first(ours.is_first), flags(lambda step, env: step.episode_step == 0))
        terminal = flags(lambda step, env: ended[step.slot, env] and not truncated[step.slot, env])
        assert_same(batch_first(ours.terminals), terminal)
        assert_same(batch_first(ours.truncations), flags(lambda step, env: truncated[step.slot, env]))
        assert_same(batch_first(ours.latents), {name: rows(array) for name, array in self.steps_kept.latents.items()})
        positions = np.full((len(windows), total), -1)
        for row, (env, window) in zip(positions, windows, strict=True):
            row[: len(window)] = [step.number * self.plan.n_envs + env for step in window]
        assert_same(batch_first(ours.positions), positions)

    def _write_latents(self, ours: Any) -> None:
        """Update the latents of all steps of a batch, or of some, with other values."""
        part = slice(int(self.rng.integers(ours.positions.shape[1])), None)
        positions = ours.positions[:, part]
        self._update({name: values[:, part] for name, values in ours.latents.items()}, positions)

    def write_stale_latents(self) -> None:
        """Update latents of a batch after some of its steps were overwritten or removed."""
        if self.subject.n_sequences == 0 or self.plan.options.get("online_queue"):
            return
        ours = self.subject.sample(8)
        self.add_some()
        if self.rng.random() < 0.2:
            self.reset()
        self._update(ours.latents, ours.positions)

    def _update(self, latents: dict[str, Any], positions: Any) -> None:
        kept, n_envs = self.steps_kept, self.plan.n_envs
        slots = {(step.number, env): step.slot for env, steps in enumerate(kept.of_env) for step in steps}
        for name, values in latents.items():
            values = self.rng.normal(size=values.shape).astype(kept.latents[name].dtype)
            given = self._as_tensors({name: values}) if self.rng.random() < 0.5 else {name: values}
            self.subject.update_latents(positions, given)
            flat = values.reshape(-1, *kept.latents[name].shape[2:])
            for position, value in zip(positions.reshape(-1).tolist(), flat, strict=True):
                number, env = divmod(position, n_envs)
                if (number, env) in slots:
                    kept.latents[name][slots[number, env], env] = value

    def compare_everything(self) -> None:
        super().compare_everything()
        kept = self.steps_kept
        if self.sequence_priorities is not None:
            values = self.sequence_priorities.by_place(kept, self.plan.n_envs)
            np.testing.assert_allclose(self.subject._tree[np.arange(len(values))], values, rtol=1e-12)
        for name, array in kept.latents.items():
            assert_same(plain(getattr(self.subject, f"latent_{name}")), array)
        for env, steps in enumerate(kept.of_env):
            expected = [step.slot for e, i in kept.anchors() if e == env for step in steps[i : i + 1]]
            assert self.subject._index.anchors.of_env(env).tolist() == expected
            stored = self.subject.episode_steps[[step.slot for step in steps], env]
            assert stored.tolist() == [step.episode_step for step in steps]

    # On disk

    def beside_model(self) -> Any:
        return self.sequence_priorities, self.steps_kept

    def use_beside_model(self, kept: Any) -> None:
        self.sequence_priorities, self.steps_kept = kept
