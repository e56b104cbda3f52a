"""What a buffer costs while a model learns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback


class _Stopwatch:
    """Stands in for a method of one buffer and times it. It can be pickled with the buffer."""

    def __init__(self, buffer: Any, name: str) -> None:
        self.buffer = buffer
        self.name = name
        self.seconds = 0.0
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = getattr(type(self.buffer), self.name)(self.buffer, *args, **kwargs)
        self.note(time.perf_counter() - began)
        return result

    def note(self, seconds: float) -> None:
        self.seconds += seconds
        self.calls += 1

    def lap(self) -> float | None:
        """Mean microseconds of a call since the last lap, or ``None`` without one."""
        mean = 1e6 * self.seconds / self.calls if self.calls else None
        self.seconds, self.calls = 0.0, 0
        return mean


class _BatchStopwatch(_Stopwatch):
    """For a method that yields batches: times each of them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        batches = getattr(type(self.buffer), self.name)(self.buffer, *args, **kwargs)
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.note(time.perf_counter() - began)
            yield batch


class BufferStatsCallback(BaseCallback):
    """Logs, with everything else that SB3 logs, what the model's replay or rollout buffer costs:

    =============================  =======================================================================
    ``buffer/ratio``               how many times smaller than SB3's buffer the compressed one is
    ``buffer/bytes``               memory that the buffer takes for what it holds now
    ``buffer/bytes_per_transition``
    ``buffer/add_microseconds``    mean of the calls since the last log
    ``buffer/sample_microseconds`` the same for a batch
    =============================  =======================================================================
    """

    def __init__(self, verbose: int = 0) -> None:
        super().__init__(verbose)
        self._buffer: Any = None
        self._stopwatches: dict[str, _Stopwatch] = {}

    def _on_training_start(self) -> None:
        replay = getattr(self.model, "replay_buffer", None)
        self._buffer = replay if replay is not None else getattr(self.model, "rollout_buffer", None)
        if self._buffer is None:
            return
        reading = _Stopwatch(self._buffer, "sample") if replay is not None else _BatchStopwatch(self._buffer, "get")
        self._stopwatches = {"add": _Stopwatch(self._buffer, "add"), "sample": reading}
        for stopwatch in self._stopwatches.values():
            setattr(self._buffer, stopwatch.name, stopwatch)

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        if self._buffer is None:
            return
        for key, value in self._memory().items():
            self.logger.record(f"buffer/{key}", value)
        for name, stopwatch in self._stopwatches.items():
            mean = stopwatch.lap()
            if mean is not None:
                self.logger.record_mean(f"buffer/{name}_microseconds", mean)

    def _on_training_end(self) -> None:
        for stopwatch in self._stopwatches.values():
            vars(self._buffer).pop(stopwatch.name, None)
        self._stopwatches = {}

    def _memory(self) -> dict[str, float]:
        if hasattr(self._buffer, "memory_usage"):
            usage = self._buffer.memory_usage()
            return {
                "ratio": usage.ratio,
                "bytes": usage.total,
                "bytes_per_transition": usage.bytes_per_transition,
            }
        arrays = [array for array in vars(self._buffer).values() if isinstance(array, np.ndarray)]
        return {"bytes": sum(array.nbytes for array in arrays)}
