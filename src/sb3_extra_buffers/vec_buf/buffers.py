"""One rollout buffer that forwards to several others."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_extra_buffers.errors import ConfigurationError


class DummyVecRolloutBuffer(RolloutBuffer):
    """Forwards every call to all of its buffers, and returns the result of the first.

    So a model can train on one buffer while others get the same steps, to be measured or compared. All of them sample
    the batches that the first one would sample alone.

    :param use_threads: Run the calls in parallel, one thread per buffer.
    :param buffers: Rollout buffers with the same number of steps and environments as this one; or functions that create
        one, such as a class or a :class:`functools.partial`, which are called with the arguments of this one.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        n_envs: int = 1,
        use_threads: bool = False,
        buffers: Iterable[RolloutBuffer | Callable[..., RolloutBuffer]] | None = None,
        **kwargs: Any,
    ) -> None:
        arguments = {**kwargs, "device": device, "n_envs": n_envs}
        self.buffers: list[RolloutBuffer] = [
            buffer
            if isinstance(buffer, RolloutBuffer)
            else buffer(buffer_size, observation_space, action_space, **arguments)
            for buffer in buffers or ()
        ]
        if not self.buffers:
            raise ConfigurationError("buffers must name at least one rollout buffer.")
        for buffer in self.buffers:
            if (buffer.buffer_size, buffer.n_envs) != (buffer_size, n_envs):
                raise ConfigurationError(
                    f"All buffers must be for {buffer_size} steps of {n_envs} environments, "
                    f"not {buffer.buffer_size} of {buffer.n_envs} as the {type(buffer).__name__}."
                )
        self.use_threads = use_threads
        self._threads: ThreadPoolExecutor | None = None
        super().__init__(buffer_size, observation_space, action_space, **arguments)

    def __getattr__(self, name: str) -> Any:
        # Only for attributes that this object does not have, such as `values` and `returns`.
        buffers = self.__dict__.get("buffers")
        if not buffers:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(buffers[0], name)

    def reset(self) -> None:
        self._for_all(lambda buffer: buffer.reset())
        self._follow_first()

    def add(
        self,
        obs: Any,
        action: np.ndarray,
        reward: np.ndarray,
        episode_start: np.ndarray,
        value: th.Tensor,
        log_prob: th.Tensor,
        **kwargs: Any,
    ) -> None:
        def add(buffer: RolloutBuffer) -> None:
            # SB3's Dict buffers change the dict that they are given.
            own: Any = dict(obs) if isinstance(obs, dict) else obs
            buffer.add(own, action, reward, episode_start, value, log_prob, **kwargs)

        self._for_all(add)
        self._follow_first()

    def compute_returns_and_advantage(self, last_values: th.Tensor, dones: np.ndarray) -> None:
        self._for_all(lambda buffer: buffer.compute_returns_and_advantage(last_values, dones))

    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        generators = {id(buffer): buffer.get(batch_size) for buffer in self.buffers}
        # Each buffer shuffles a whole epoch at its first batch, from the same state of NumPy's global generator. Not in
        # threads, because they would share that generator.
        random_state = np.random.get_state()
        first_batches = []
        for buffer in self.buffers:
            np.random.set_state(random_state)
            first_batches.append(next(generators[id(buffer)]))
        self._follow_first()
        batch = first_batches[0]
        while batch is not None:
            yield batch
            batch = self._for_all(lambda buffer: next(generators[id(buffer)], None))

    def _for_all(self, call: Callable[[RolloutBuffer], Any]) -> Any:
        """Call a function for all buffers, and return the result of the first. Errors are raised after all calls."""
        if not self.use_threads or len(self.buffers) == 1:
            first, *_ = [call(buffer) for buffer in self.buffers]
            return first
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(self.buffers), thread_name_prefix="vec-buf")
        futures = [self._threads.submit(call, buffer) for buffer in self.buffers]
        wait(futures)
        first, *_ = [future.result() for future in futures]
        return first

    def _follow_first(self) -> None:
        first = self.buffers[0]
        self.pos, self.full, self.generator_ready = first.pos, first.full, first.generator_ready

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_threads": None}
