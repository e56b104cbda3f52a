"""Histories of segments: steps are added to a sender, which sends them to the tested buffer in segments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sb3_extra_buffers.errors import CorruptDataError
from tests.histories.history import History, goal_env
from tests.histories.models import OneBufferPerKey, clear_timeouts, mark_last_as_cut
from tests.histories.plans import HOST_METHODS, Plan
from tests.histories.replay_history import ReplayHistory
from tests.histories.rollout_history import RolloutHistory

MOST_AT_ONCE = 41


class _Sending(History):
    """The common part: the sender and its segments."""

    sender: Any
    last_segment: bytes
    sent_to: Any = None
    """The buffer that ingested the last segment. Copies of it do not have the references of earlier segments."""
    has_gap = False
    """Whether steps were dropped before they were sent."""

    def sender_options(self) -> dict[str, Any]:
        """The receiver's options, sometimes with another method, so that codecs change."""
        options = {name: value for name, value in self.plan.options.items() if name != "verify"}
        if self.rng.random() < 0.3:
            options |= {"compression_method": str(self.rng.choice(HOST_METHODS)), "compression_kwargs": None}
            options.pop("dtypes", None)
        return options

    def operations(self) -> dict[Any, float]:
        return {**super().operations(), self.send_again: 2.0}

    def send(self) -> None:
        restart = self.sent_to is not self.subject
        segment = self.sender.export_segment(restart=restart, policy_version=self.taken, extra={"taken": self.taken})
        self.sender.check()
        if self.rng.random() < 0.1:
            self.damage(segment)
        before = self.subject.pos, self.model_is_empty()
        info = self.subject.ingest_segment(segment)
        assert (info.policy_version, info.extra) == (self.taken, {"taken": self.taken})
        assert info.continues == (not restart and not self.has_gap)
        self.has_gap = False
        if restart and not before[1]:
            self.cut_model(before[0])
        self.sent_to = self.subject
        self.last_segment = segment

    def send_again(self) -> None:
        """Send a segment twice, which must have no effect."""
        if self.sent_to is self.subject:
            assert self.subject.ingest_segment(self.last_segment).n_steps == 0

    def damage(self, segment: bytes) -> None:
        """Send a damaged segment, which must raise an error and leave the buffer unchanged."""
        damaged = bytearray(segment)
        damaged[int(self.rng.integers(len(damaged)))] ^= 1 << int(self.rng.integers(8))
        position = self.subject.pos
        cut = damaged if self.rng.random() < 0.5 else segment[: int(self.rng.integers(len(segment)))]
        with pytest.raises((ValueError, CorruptDataError)):
            self.subject.ingest_segment(bytes(cut))
        assert self.subject.pos == position
        self.check()

    def model_is_empty(self) -> bool:
        raise NotImplementedError

    def cut_model(self, pos: int) -> None:
        """Apply to the model what a segment does that does not continue the last one."""


class SegmentReplayHistory(ReplayHistory, _Sending):
    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan, folder)
        arguments = {"device": plan.device, "n_envs": plan.n_envs, **plan.shared_options, **self.sender_options()}
        if self.is_her:
            arguments["env"] = goal_env(self)
        elif self.rng.random() < 0.2 and "Prioritized" not in plan.name.buffer and "NStep" not in plan.name.buffer:
            # Not the other way round: the sender would lose next observations that differ from the following step.
            arguments |= {"optimize_memory_usage": False}
        slots = int(self.rng.integers(MOST_AT_ONCE + 1, 3 * MOST_AT_ONCE))
        self.sender = self.cls(slots * plan.n_envs, self.space, self.action_space, **arguments)

    def add_some(self) -> None:
        super().add_some()
        self.send()

    def add(self) -> None:
        step = self.next_step()
        self.sender.add(*self.copied(step))
        self.waiting = [*getattr(self, "waiting", []), self.copied(step)]

    def send(self) -> None:
        super().send()
        for step in self.waiting:
            slot = self.model.pos
            if not self.model.handle_timeout_termination:
                clear_timeouts(self.model, slot)
            self.model.add(*step)
            if self.priorities is not None:
                self.priorities.added(slot)
        self.waiting = []

    def model_is_empty(self) -> bool:
        return self.model.size() == 0

    def cut_model(self, pos: int) -> None:
        if self.is_her:
            self.model.truncate_last_trajectory()
        elif isinstance(self.model, OneBufferPerKey):
            self.model.mark_last_as_cut()
        else:
            mark_last_as_cut(self.model)


class SegmentRolloutHistory(RolloutHistory, _Sending):
    n_unsent = 0

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan, folder)
        more = {"hidden_state_shape": (plan.slots, 1, plan.n_envs, 3)} if self.is_recurrent else {}
        arguments = {"device": plan.device, "n_envs": plan.n_envs, **plan.shared_options, **more}
        self.sender = self.cls(plan.slots, self.space, self.action_space, **arguments, **self.sender_options())
        self.sender.reset()

    def add(self) -> None:
        receiver, self.subject = self.subject, self.sender
        try:
            super().add()
        finally:
            self.subject = receiver
        self.n_unsent += 1
        if self.sent_to is not self.subject and self.subject.pos:
            self.sent_to = None
        if self.rng.random() < 0.3 or self.model.full:
            self.send()

    def send(self) -> None:
        super().send()
        self.n_unsent = 0

    def give_up(self) -> None:
        super().give_up()
        self.sender.reset()
        self.has_gap, self.n_unsent = self.has_gap or self.n_unsent > 0, 0

    def go_on_with(self, other: Any) -> None:
        """Compare the copy, but send segments to the original, which has the references of earlier ones."""
        before, self.subject = self.subject, other
        if self.subject.pos == self.model.pos:
            self.compare_everything()
        self.subject = before

    def compare_everything(self) -> None:
        if self.subject.pos == self.model.pos:
            super().compare_everything()

    def use_memory_report(self) -> None:
        if self.subject.pos == self.model.pos:
            super().use_memory_report()

    def model_is_empty(self) -> bool:
        return True
