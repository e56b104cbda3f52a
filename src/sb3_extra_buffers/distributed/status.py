"""A status line in the terminal for learners with collectors."""

from __future__ import annotations

import sys
import time
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback
from tqdm import tqdm

_UPDATE_SECONDS = 0.5
"""The shortest time between two updates of the line."""


class StatusLine(BaseCallback):
    """A callback that shows progress, throughput and restarts of collectors in one line."""

    def __init__(self) -> None:
        super().__init__()
        self._bar: Any = None
        self._updated = 0.0

    def _on_training_start(self) -> None:
        total: Any = self.locals.get("total_timesteps")
        self._bar = tqdm(total=total, unit=" steps", unit_scale=True, file=sys.stderr, dynamic_ncols=True)

    def _on_step(self) -> bool:
        now = time.monotonic()
        if now - self._updated >= _UPDATE_SECONDS:
            self._updated = now
            self._show()
        return True

    def _show(self) -> None:
        model: Any = self.model
        self._bar.update(self.num_timesteps - self._bar.n)
        intake = getattr(model, "_intake", None)
        if intake is not None:
            scalars = intake.statistics.scalars()
            parts = [
                f"received {scalars['transitions_per_second']:,.0f}/s",
                f"{scalars['bytes_per_transition']:,.0f} B each",
                f"{intake.n_waiting} steps queued",
                f"{model._n_updates:,} updates",
                f"weights {scalars['weights_behind']:.0f} versions old",
            ]
            if scalars["restarts"]:
                parts.append(f"{scalars['restarts']:.0f} restarts")
            self._bar.set_postfix_str(", ".join(parts), refresh=True)

    def _on_training_end(self) -> None:
        self._show()
        self._bar.close()
