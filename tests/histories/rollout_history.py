"""Histories of rollout buffers: filled, read in epochs, and emptied, repeatedly."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from sb3_contrib.common.recurrent.type_aliases import RNNStates

from tests.histories.history import History
from tests.histories.models import model_class
from tests.histories.plans import Plan
from tests.transitions import assert_same

FIELDS = ("actions", "rewards", "returns", "episode_starts", "values", "log_probs", "advantages")
STATES = ("hidden_states_pi", "cell_states_pi", "hidden_states_vf", "cell_states_vf")


class RolloutHistory(History):
    """The history of any rollout buffer class."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan, folder)
        self.is_maskable, self.is_recurrent = (word in plan.name.buffer for word in ("Maskable", "Recurrent"))
        more = {"hidden_state_shape": (plan.slots, 1, plan.n_envs, 3)} if self.is_recurrent else {}
        arguments = {"device": plan.device, "n_envs": plan.n_envs, **plan.shared_options, **more}
        self.model = model_class(plan.name.buffer)(plan.slots, self.space, self.action_space, **arguments)
        self.subject = self.cls(plan.slots, self.space, self.action_space, **arguments, **plan.options)
        for buffer in (self.model, self.subject):
            buffer.reset()

    def operations(self) -> dict[Any, float]:
        often = 400.0 / self.plan.slots
        return {**super().operations(), self.add_some: 10.0, self.give_up: min(0.5, often / 20), self.finish: often}

    def add_some(self) -> None:
        for _ in range(int(self.rng.choice([1, 2, 5, 17]))):
            if not self.model.full:
                self.add()

    def add(self) -> None:
        step = self.next_step()
        more: dict[str, Any] = {}
        if self.is_maskable:
            more["action_masks"] = self.rng.integers(0, 2, (self.plan.n_envs, self.action_space.n))
        if self.is_recurrent:
            states = [
                th.from_numpy(self.rng.normal(size=(1, self.plan.n_envs, 3)).astype(np.float32)) for _ in range(4)
            ]
            more["lstm_states"] = RNNStates((states[0], states[1]), (states[2], states[3]))
        numbers = th.from_numpy(step.reward * 2), th.from_numpy(step.reward - 1)
        for buffer in (self.model, self.subject):
            obs, _, action, reward, done, _ = self.copied(step)
            if buffer is self.subject and self.plan.path in ("tensors", "kernels", "cuda") and self.rng.random() < 0.9:
                obs = self._as_tensors(obs)
            buffer.add(obs, action, reward, done, *numbers, **more)

    def _as_tensors(self, observations: Any) -> Any:
        if isinstance(observations, dict):
            return {key: self._as_tensors(part) for key, part in observations.items()}
        return th.from_numpy(observations).to(self.plan.device)

    def give_up(self) -> None:
        """End a rollout early, which leaves records unfinished."""
        for buffer in (self.model, self.subject):
            buffer.reset()

    def finish(self) -> None:
        """Complete the rollout, read it as training does, and start the next."""
        while not self.model.full:
            self.add()
        last_values, dones = (
            th.from_numpy(self.rng.normal(size=self.plan.n_envs).astype(np.float32)),
            np.zeros(self.plan.n_envs),
        )
        for buffer in (self.model, self.subject):
            buffer.compute_returns_and_advantage(last_values, dones)
        self.check()
        for _ in range(int(self.rng.integers(1, 4))):
            self.read_an_epoch()
        if self.rng.random() < 0.15:
            self.save_and_load()
            self.read_an_epoch()
        if self.rng.random() < 0.3:
            self.compare_everything()
        self.give_up()

    def read_an_epoch(self) -> None:
        """Read all batches of an epoch, or only the first ones, as when PPO stops early."""
        size = self.rng.choice([None, 7, 32, 97])
        most = int(self.rng.choice([1, 2, 1000]))
        seed, epochs = self.seeded(), []
        for buffer in (self.model, self.subject):
            np.random.seed(seed)
            epochs.append(list(itertools.islice(buffer.get(size), most)))
        theirs, ours = epochs
        assert len(ours) == len(theirs)
        for left, right in zip(ours, theirs, strict=True):
            assert_same(tuple(left), tuple(self.expected(part) if i == 0 else part for i, part in enumerate(right)))

    def compare_everything(self) -> None:
        self.compare_observations(self.subject.observations, self.model.observations, slice(None))
        masks = ("action_masks",) if self.is_maskable else ()
        self.compare_fields((*FIELDS, *masks, *(STATES if self.is_recurrent else ())))
