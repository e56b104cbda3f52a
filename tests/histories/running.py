"""Runs one history, and reports how to repeat it."""

from __future__ import annotations

import tempfile
import warnings
import zlib
from pathlib import Path

import numpy as np

from tests.histories.plans import Name, draw_plan
from tests.histories.replay_history import ReplayHistory
from tests.histories.rollout_history import RolloutHistory
from tests.histories.segment_history import SegmentReplayHistory, SegmentRolloutHistory
from tests.histories.sequence_history import SequenceHistory
from tests.histories.surroundings import surroundings
from tests.histories.visits import Visits, counted


class HistoryError(AssertionError):
    """A buffer returned something else than SB3's, or raised an error."""


def run_history(name: Name, visits: Visits | None = None, path: str | None = None) -> Visits:
    """Run a history to its end and return its counts of rare events.

    :param path: Overrides the drawn :attr:`.Plan.path`.
    """
    visits = Visits() if visits is None else visits
    plan = draw_plan(name, path)
    rng = np.random.default_rng([zlib.crc32(str(name).encode()), 2])
    with (
        tempfile.TemporaryDirectory(prefix="history-") as folder,
        warnings.catch_warnings(),
        surroundings(plan, rng),
        counted(visits),
    ):
        # Expected: some histories use indexed_colour for a space that is not RGB.
        warnings.filterwarnings("ignore", message=".*indexed_colour.*")
        warnings.filterwarnings("ignore", message="The last trajectory in the replay buffer will be truncated")
        history = None
        try:
            of_host = (SequenceHistory if "Sequence" in name.buffer else ReplayHistory, RolloutHistory)
            classes = (SegmentReplayHistory, SegmentRolloutHistory) if plan.path == "segments" else of_host
            history = classes[name.is_rollout](plan, Path(folder))
            history.run()
        except Exception as error:
            taken, trail = (0, "") if history is None else (history.taken, ", ".join(history.trail))
            where = "" if path is None else f" --path {path}"
            raise HistoryError(
                f"{type(error).__name__} at step {taken}: {error}\n{plan}\nLast operations: {trail}\n"
                f"Repeat with: python -m tests.histories.soak --repeat '{name}'{where}"
            ) from error
        finally:
            if history is not None and plan.on_disk and hasattr(history, "subject"):
                history.subject.close()
    return visits
