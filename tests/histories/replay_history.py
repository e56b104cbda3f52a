"""Histories of replay buffers: transitions are added and batches are sampled, in any order."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch as th

from tests.histories.history import History, goal_env
from tests.histories.models import OneBufferPerKey, Priorities, model_class, plain
from tests.histories.plans import Plan
from tests.transitions import Transition, assert_same

FIELDS = ("actions", "rewards", "dones", "timeouts")


class ReplayHistory(History):
    """The history of any replay buffer class."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan, folder)
        name = plan.name
        self.is_dict = isinstance(self.space.sample(), dict)
        self.is_her = "Her" in name.buffer
        self.optimized = bool(plan.shared_options.get("optimize_memory_usage"))
        self.home = folder / "home"
        self.model = self._make_model()
        self.priorities: Priorities | None = None
        if "Prioritized" in name.buffer and "Sequence" not in name.buffer:
            options = plan.options
            self.priorities = Priorities(self.model, options["alpha"], options["beta"], options["n_steps"], 0.99)
        self.subject = self._make_subject()
        self.flushed: tuple[Any, Any] | None = None
        """The model at the last flush of a buffer on disk, which also flushes on its own."""
        self._watch_flushes()

    def _make_model(self) -> Any:
        plan, cls = self.plan, model_class(self.plan.name.buffer)
        arguments = {"device": plan.device, "n_envs": plan.n_envs, **plan.shared_options}
        size = plan.slots * plan.n_envs
        if self.is_her:
            return cls(size, self.space, self.action_space, env=goal_env(self), **arguments)
        if self.is_dict and (self.optimized or "NStep" in plan.name.buffer):
            single = model_class(plan.name.buffer.replace("Dict", ""))
            return OneBufferPerKey(single, size, self.space, self.action_space, **arguments)  # type: ignore[arg-type]
        return cls(size, self.space, self.action_space, **arguments)

    def _make_subject(self) -> Any:
        plan = self.plan
        arguments = {"device": plan.device, "n_envs": plan.n_envs, **plan.shared_options, **plan.options}
        if plan.on_disk:
            arguments |= {"storage": "mmap", "path": self.home}
        if self.is_her:
            arguments["env"] = goal_env(self)
        return self.cls(plan.slots * plan.n_envs, self.space, self.action_space, **arguments)

    def operations(self) -> dict[Any, float]:
        operations = {
            **super().operations(),
            self.add_some: 20.0,
            self.sample: 10.0,
            self.index: 4.0,
            self.reset: 0.15,
            self.assign_device: 0.3,
        }
        # Kernels gather fields only until their arrays are accessed.
        if self.plan.path != "kernels":
            operations[self.end_episodes] = 0.5
        if self.plan.writes_by_index:
            operations[self.write_by_index] = 2.0
        if self.plan.on_disk:
            operations |= {self.flush: 0.5, self.crash: 1.0, self.close_and_reopen: 0.5}
        return operations

    # Writing

    def add_some(self) -> None:
        for _ in range(int(self.rng.choice([3, 4, 5] if self.plan.path == "kernels" else [1, 2, 5, 17, 40]))):
            self.add()

    def add(self) -> None:
        step = self.next_step()
        slot = self.subject.pos
        self.subject.add(*self.on_device(step))
        self.model.add(*self.copied(step))
        if self.priorities is not None:
            self.priorities.added(slot)

    def on_device(self, step: Transition) -> Transition:
        """A copy of a step for our buffer, sometimes with observations as tensors on its device."""
        ours = self.copied(step)
        if self.plan.path in ("tensors", "kernels", "cuda") and self.rng.random() < 0.9:
            obs, next_obs = (self._as_tensors(part) for part in ours[:2])
            ours = ours._replace(obs=obs, next_obs=next_obs)
        return ours

    def _as_tensors(self, values: Any) -> Any:
        if isinstance(values, dict):
            return {key: self._as_tensors(part) for key, part in values.items()}
        return th.from_numpy(values).to(self.plan.device)

    def end_episodes(self) -> None:
        """End all episodes, as algorithms do when ``learn`` starts again."""
        if self.model.size() == 0:
            return
        if self.is_her:
            for buffer in (self.model, self.subject):
                buffer.truncate_last_trajectory()
        elif isinstance(self.model, OneBufferPerKey):
            self.model.mark_last_done()
            self.subject.dones[self.subject.pos - 1] = True
        else:
            for buffer in (self.model, self.subject):
                buffer.dones[buffer.pos - 1] = True

    def reset(self) -> None:
        for buffer in (self.model, self.subject):
            buffer.reset()
        if self.is_her:  # SB3 keeps its episodes, so it would sample from the steps just removed
            self.model.ep_length[:] = 0
            self.model._current_ep_start[:] = 0
        if self.priorities is not None:
            self.priorities.cleared()

    def write_by_index(self) -> None:
        """Assign observations to random slots and environments, often to the newest slot."""
        step = self.next_step()
        slot, env = int(self.rng.integers(self.plan.slots)), int(self.rng.integers(self.plan.n_envs))
        if self.rng.random() < 0.3:
            slot = (self.subject.pos - 1) % self.plan.slots
        names = ["observations"] if self.optimized else ["observations", "next_observations"]
        name = str(self.rng.choice(names))
        ours, theirs = getattr(self.subject, name), getattr(self.model, name)
        for key in step.obs if self.is_dict else [None]:
            left, right, value = (ours, theirs, step.obs) if key is None else (ours[key], theirs[key], step.obs[key])
            value = value.reshape(self.plan.n_envs, *right.shape[2:])
            if self.rng.random() < 0.5:
                left[slot] = right[slot] = value
            else:
                left[slot, env] = right[slot, env] = value[env]

    def assign_device(self) -> None:
        self.subject.device = th.device(self.subject.device)

    # Reading

    def sample(self) -> None:
        size = int(self.rng.choice([2, 14] if self.plan.path == "kernels" else [1, 8, 33, 64]))
        if self.model.size() == 0 or (self.is_her and not (self.model.ep_length > 0).any()):
            return
        # With optimize_memory_usage, a full buffer of one slot has no transition with a successor.
        if self.plan.slots < 2:
            return
        if self.priorities is not None:
            self._sample_by_priority(self.priorities, size)
            return
        seed = self.seeded()
        np.random.seed(seed)
        theirs = self.model.sample(size)
        drawn = np.random.random()
        np.random.seed(seed)
        ours = self.subject.sample(size)
        assert np.random.random() == drawn, "sample() drew another number of random numbers than SB3."
        expected = [self.expected(part) if i in (0, 2) else part for i, part in enumerate(theirs)]
        assert_same(tuple(ours)[: len(expected)], tuple(expected))

    def _sample_by_priority(self, priorities: Priorities, size: int) -> None:
        if not priorities.values.any():
            return
        seed = self.seeded()
        np.random.seed(seed)
        random = np.random.random_sample(size)
        np.random.seed(seed)
        ours = self.subject.sample(size)
        priorities.check_indices(ours.indices, random)
        slots, envs = np.divmod(ours.indices, self.plan.n_envs)
        drawn = priorities.drawn(ours.indices)
        columns = (
            (ours.observations, "observations", slots),
            (ours.next_observations, "next_observations", drawn.last_slots),
        )
        for found, name, where in columns:
            column = getattr(self.model, name)
            taken = {key: part[where, envs] for key, part in column.items()} if self.is_dict else column[where, envs]
            assert_same(plain(found), self.expected(taken))
        assert_same(plain(ours.actions), drawn.actions)
        assert_same(plain(ours.dones), drawn.dones)
        np.testing.assert_allclose(plain(ours.rewards), drawn.rewards, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(plain(ours.weights), priorities.weights(ours.indices), rtol=1e-6)
        if drawn.discounts is not None:
            np.testing.assert_allclose(plain(ours.discounts), drawn.discounts, rtol=1e-6)
        errors = self.rng.normal(size=size) * self.rng.choice([0.1, 1, 10])
        self.subject.update_priorities(ours.indices, errors)
        priorities.update(ours.indices, errors, self.subject.epsilon)

    def index(self) -> None:
        n = int(self.rng.integers(1, 20))
        slots, envs = self.rng.integers(self.plan.slots, size=n), self.rng.integers(self.plan.n_envs, size=n)
        places: Any = [(slots, envs), (slots, envs, slice(None)), int(slots[0]), (int(slots[0]), int(envs[0]))]
        self._compare_columns(places[int(self.rng.integers(len(places)))])

    def _compare_columns(self, places: Any) -> None:
        self.compare_observations(self.subject.observations, self.model.observations, places)
        if not self.optimized:
            self.compare_observations(self.subject.next_observations, self.model.next_observations, places)

    def compare_everything(self) -> None:
        self._compare_columns(slice(None))
        self.compare_fields((*FIELDS, *(("ep_start", "ep_length", "_current_ep_start") if self.is_her else ())))
        if self.is_her and self.plan.shared_options["copy_info_dict"]:
            assert self.subject.infos.tolist() == self.model.infos.tolist()
        if self.priorities is not None:
            places = np.arange(len(self.priorities.values))
            np.testing.assert_allclose(self.subject._tree[places], self.priorities.values, rtol=1e-12)

    def go_on_with(self, other: Any) -> None:
        if self.is_her and other.env is None:
            other.set_env(goal_env(self))
        super().go_on_with(other)

    # On disk

    def _watch_flushes(self) -> None:
        if not self.plan.on_disk:
            return
        folder = self.subject._folder
        flush = folder.flush

        def watched(buffer: Any) -> None:
            flush(buffer)
            self.flushed = copy.deepcopy((self.model, self.beside_model()))

        folder.flush = watched

    def flush(self) -> None:
        self.subject.flush()

    def crash(self) -> None:
        """Copy the folder of a buffer on disk as after a crash. The copy must contain the state of the last flush."""
        if self.flushed is None:
            return
        left_behind = self.folder / "left behind"
        shutil.rmtree(left_behind, ignore_errors=True)
        shutil.copytree(self.home, left_behind)
        before, kept = (self.subject, self.model), self.beside_model()
        self.model, kept_then = self.flushed
        self.use_beside_model(kept_then)
        self.subject = self._load(left_behind)
        self.compare_everything()
        self.subject.close()
        (self.subject, self.model), _ = before, self.use_beside_model(kept)

    def beside_model(self) -> Any:
        """State that belongs to the model but is stored outside it."""
        return self.priorities

    def use_beside_model(self, kept: Any) -> None:
        self.priorities = kept

    def close_and_reopen(self) -> None:
        self.subject.close()
        del self.subject
        self.subject = self._load(self.home) if self.rng.random() < 0.5 else self._make_subject()
        self._watch_flushes()
        self.compare_everything()

    def _load(self, path: Path) -> Any:
        env = {"env": goal_env(self)} if self.is_her else {}
        return self.cls.load(path, device=self.plan.device, **env)
