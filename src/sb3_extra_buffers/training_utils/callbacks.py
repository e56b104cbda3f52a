"""Log what a buffer costs during training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback


class CallTimer:
    """Takes the place of a method of one buffer and times its calls. It can be pickled with the buffer."""

    def __init__(self, buffer: Any, method: str) -> None:
        self.buffer = buffer
        self.method = method
        self.seconds = 0.0
        self.calls = 0

    @classmethod
    def attach(cls, buffer: Any, method: str) -> CallTimer:
        """Time ``buffer.method()`` from now on."""
        timer = cls(buffer, method)
        setattr(buffer, method, timer)
        return timer

    def detach(self) -> None:
        vars(self.buffer).pop(self.method, None)
        self.buffer = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = getattr(type(self.buffer), self.method)(self.buffer, *args, **kwargs)
        self._count(start)
        return result

    @property
    def mean_microseconds(self) -> float | None:
        """The mean of a call since the last ``reset``, or ``None`` without a call."""
        return 1e6 * self.seconds / self.calls if self.calls else None

    def reset(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def _count(self, start: float) -> None:
        self.seconds += time.perf_counter() - start
        self.calls += 1


class BatchTimer(CallTimer):
    """For a method that yields batches: times each batch."""

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        batches = getattr(type(self.buffer), self.method)(self.buffer, *args, **kwargs)
        while True:
            start = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._count(start)
            yield batch


class BufferStatsCallback(BaseCallback):
    """Adds the cost of the model's replay or rollout buffer to what SB3 logs:

    =============================  =======================================================================
    ``buffer/ratio``               how many times smaller than SB3's buffer the compressed one is
    ``buffer/bytes``               memory of the buffer for what it holds now
    ``buffer/bytes_per_transition``
    ``buffer/add_microseconds``    mean of the calls since the last log
    ``buffer/sample_microseconds`` the same for a batch
    =============================  =======================================================================
    """

    def __init__(self, verbose: int = 0) -> None:
        super().__init__(verbose)
        self._buffer: Any = None
        self._timers: dict[str, CallTimer] = {}

    def _on_training_start(self) -> None:
        replay = getattr(self.model, "replay_buffer", None)
        self._buffer = replay if replay is not None else getattr(self.model, "rollout_buffer", None)
        if self._buffer is not None:
            sample = (
                CallTimer.attach(replay, "sample") if replay is not None else BatchTimer.attach(self._buffer, "get")
            )
            self._timers = {"add": CallTimer.attach(self._buffer, "add"), "sample": sample}

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        if self._buffer is None:
            return
        for key, value in self._memory().items():
            self.logger.record(f"buffer/{key}", value)
        for name, timer in self._timers.items():
            if timer.mean_microseconds is not None:
                self.logger.record_mean(f"buffer/{name}_microseconds", timer.mean_microseconds)
            timer.reset()

    def _on_training_end(self) -> None:
        for timer in self._timers.values():
            timer.detach()
        self._timers = {}

    def _memory(self) -> dict[str, float]:
        if hasattr(self._buffer, "memory_usage"):
            usage = self._buffer.memory_usage()
            return {"ratio": usage.ratio, "bytes": usage.total, "bytes_per_transition": usage.bytes_per_transition}
        arrays = [array for array in vars(self._buffer).values() if isinstance(array, np.ndarray)]
        return {"bytes": sum(array.nbytes for array in arrays)}
