"""The check of what was lost with collectors does find losses."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from stable_baselines3 import DQN

from sb3_extra_buffers.distributed import distributed, learner
from sb3_extra_buffers.distributed.transport import LocalTransport, Reply
from tests.soak.collectors import N_ENVS, SEGMENT_STEPS, CountingEnv, check_losses, kinds_to_kill

AHEAD = 2


class Transport(LocalTransport):
    """Does something to the seventh segment of the first collector, or kills that collector."""

    fault = ""
    n_replies = 0

    def replies(self, timeout: float) -> list[Reply]:
        replies = super().replies(timeout)
        self.n_replies += sum(reply.collector == 0 for reply in replies)
        if self.n_replies == 7 and replies and replies[0].collector == 0 and self.fault:
            fault, self.fault = self.fault, ""
            if fault == "killed":
                return [Reply(0, None, "killed")]
            if fault == "dropped":  # and its collector goes on, as if nothing had happened
                return [*super().replies(timeout), *super().replies(timeout)]
        return replies


def losses_of(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    (folder / "counts").mkdir()
    (folder / "own").mkdir()
    transport = Transport()
    transport.fault = fault
    monkeypatch.setattr(learner, "LocalTransport", lambda: transport)
    collectors = {"n": 2, "envs": N_ENVS, "segment_steps": SEGMENT_STEPS, "ahead": AHEAD, "in_process": True}
    model = distributed(DQN)(
        "MlpPolicy", CountingEnv(folder / "own"), device="cpu", seed=0, learning_starts=1000, buffer_size=4000,
        policy_kwargs={"net_arch": [8]},
        collectors={**collectors, "make_env": partial(CountingEnv, folder / "counts")},
    )  # fmt: skip
    model.learn(600)
    parts = model.replay_buffer.parts
    running = {int(number) for part in parts for number in np.asarray(part.observations)[part.pos - 1, :, 0]}
    return check_losses(parts, folder / "counts", running, AHEAD)


def test_nothing_is_lost_without_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert losses_of("", tmp_path, monkeypatch) == 0


def test_a_collector_that_is_killed_loses_one_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < losses_of("killed", tmp_path, monkeypatch) <= N_ENVS * (SEGMENT_STEPS + 2)


def test_a_segment_that_is_dropped_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="missing"):
        losses_of("dropped", tmp_path, monkeypatch)


def test_a_gap_without_a_boundary_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sb3_extra_buffers.compressed import CompressedReplayBuffer

    monkeypatch.setattr(CompressedReplayBuffer, "_end_episodes", lambda self: None)
    with pytest.raises(AssertionError, match="without a boundary"):
        losses_of("killed", tmp_path, monkeypatch)


@pytest.mark.parametrize("seed", range(20))
def test_each_kind_is_killed_several_times(seed: int) -> None:
    kinds = kinds_to_kill(50, True, np.random.default_rng(seed))
    assert [kinds.count(kind) for kind in ("node", "shard", "collector")] == [5, 22, 23]
    assert set(kinds_to_kill(20, False, np.random.default_rng(seed))) == {"node", "collector"}
