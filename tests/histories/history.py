"""The base class of all histories: persistence, reading, and the comparison."""

from __future__ import annotations

import copy
import pickle
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import DummyVecEnv

import sb3_extra_buffers.compressed as compressed
import sb3_extra_buffers.gpu_buffers as gpu_buffers
from tests.histories import worlds
from tests.histories.models import plain
from tests.histories.plans import Plan
from tests.histories.real_games import real_game
from tests.transitions import Transition, assert_same


class History:
    """Applies the same operations to SB3's buffer, ``model``, and to ours, ``subject``. Subclasses add operations."""

    model: Any
    subject: Any

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.rng = np.random.default_rng([zlib.crc32(str(plan.name).encode()), 1])
        name = plan.name
        known = {**worlds.SPACES, **worlds.DICT_SPACES, **worlds.GOALS}
        if name.world in known:
            self.space, self.action_space = known[name.world], plan.action_space
            longest = 30 if "Her" in name.buffer else 6 if plan.path == "kernels" else 10_000
            self.steps: Iterator[Transition] = worlds.transitions(
                self.space, self.action_space, plan.n_envs, self.rng, longest
            )
        else:
            seed = int(self.rng.integers(1 << 30))
            self.space, self.action_space, self.steps = real_game(name.world, plan.n_envs, seed)
        package = gpu_buffers if name.on_device else compressed
        self.cls = getattr(package, name.buffer)
        self.layout = str(self.rng.choice(["C", "C", "transposed", "both"]))
        """The memory layout of images. SB3's wrappers return channel-first views of channel-last memory."""
        self.taken = 0
        self.trail: list[str] = []
        """The last operations, newest last."""

    def run(self) -> None:
        """Run the whole history. Raise an error as soon as the buffers differ."""
        operations, chances = zip(*self.operations().items(), strict=True)
        weights = np.array(chances) / sum(chances)
        while self.taken < self.plan.name.steps:
            operation = operations[int(self.rng.choice(len(operations), p=weights))]
            self.trail = [*self.trail[-20:], operation.__name__]
            operation()
            self.check()
        self.trail.append("everything")
        self.compare_everything()

    def operations(self) -> dict[Any, float]:
        """The possible operations, with relative frequencies."""
        return {self.use_memory_report: 0.5, self.pickle: 0.3, self.deepcopy: 0.3, self.save_and_load: 1.0}

    def next_step(self) -> Transition:
        self.taken += 1
        return next(self.steps)

    def copied(self, step: Transition) -> Transition:
        """A copy of a step for one buffer, because buffers may keep or change their arguments."""
        transposed = self.layout == "transposed" or (self.layout == "both" and self.taken % 50 == 0)

        def copy_of(part: Any) -> Any:
            if isinstance(part, dict):
                return {key: copy_of(value) for key, value in part.items()}
            if transposed and part.ndim == 4:
                return part.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2)
            return part.copy(order="K")

        return Transition(*map(copy_of, step[:-1]), step.infos)

    def check(self) -> None:
        """Check the invariants of our buffer."""
        if hasattr(self.subject, "check"):
            self.subject.check()

    # Reading

    def seeded(self) -> int:
        return int(self.rng.integers(1 << 31))

    def expected(self, observations: Any, key: str | None = None) -> Any:
        """What our buffer must return if SB3's returns ``observations``: the same, unless options request floats."""
        if isinstance(observations, dict):
            return {name: self.expected(part, name) for name, part in observations.items()}
        options = self.plan.options
        space = self.space if key is None else self.space[key]
        normalize = options.get("normalize_images") and is_image_space(space, check_channels=False)
        if not normalize and options.get("output_dtype") != "float":
            return observations
        if isinstance(observations, th.Tensor):
            values = observations.to(th.float32)
            return values / 255.0 if normalize else values
        values = observations.astype(np.float32)
        return values / np.float32(255.0) if normalize else values

    def compare_observations(self, ours: Any, theirs: Any, places: Any) -> None:
        """Compare a column at ``places``, an index as SB3 uses it."""
        for key in theirs if isinstance(theirs, dict) else [None]:
            left, right = (ours, theirs) if key is None else (ours[key], theirs[key])
            assert_same(plain(left[places]), self.expected(np.asarray(right[places]), key))

    def compare_fields(self, names: tuple[str, ...]) -> None:
        for name in names:
            ours, theirs = getattr(self.subject, name), getattr(self.model, name)
            assert_same(plain(ours), np.asarray(theirs))
        assert (self.subject.pos, bool(self.subject.full)) == (self.model.pos, bool(self.model.full))

    def compare_everything(self) -> None:
        raise NotImplementedError

    # Operations of all buffers

    def use_memory_report(self) -> None:
        usage = self.subject.memory_usage()
        assert usage.transitions == self.model.size() * self.plan.n_envs
        assert min(usage.payload, usage.references, usage.index, usage.fields) >= 0
        # Memory must not grow with the length of the history: several times the raw size is a leak.
        assert usage.payload <= 3 * usage.raw_equivalent + (4 << 20)

    def pickle(self) -> None:
        self.go_on_with(pickle.loads(pickle.dumps(self.subject)))

    def deepcopy(self) -> None:
        self.go_on_with(copy.deepcopy(self.subject))

    def save_and_load(self) -> None:
        """Save to one of two files, repeatedly, and load."""
        path = self.folder / f"saved{self.rng.integers(2)}"
        for _ in range(int(self.rng.integers(1, 3))):
            self.subject.save(path)
        env = {"env": goal_env(self)} if "Her" in self.plan.name.buffer else {}
        self.go_on_with(self.cls.load(path, device=self.plan.device, mmap=bool(self.rng.random() < 0.5), **env))

    def go_on_with(self, other: Any) -> None:
        """Compare a copy. Some histories continue with it."""
        before, self.subject = self.subject, other
        self.compare_everything()
        if self.plan.on_disk or self.plan.path == "kernels" or self.rng.random() < 0.3:
            self.subject = before


class GoalEnv(gym.Env[Any, Any]):
    """Only computes the reward for hindsight experience replay."""

    def __init__(self, space: spaces.Space, action_space: spaces.Space) -> None:
        self.observation_space, self.action_space = space, action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        raise NotImplementedError

    def step(self, action: Any) -> Any:
        raise NotImplementedError

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return -(achieved != desired).any(axis=-1).astype(np.float32) - sum(len(part) for part in info)


def goal_env(history: History) -> DummyVecEnv:
    return DummyVecEnv([lambda: GoalEnv(history.space, history.action_space)] * history.plan.n_envs)
