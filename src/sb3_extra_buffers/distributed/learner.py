"""The base of all learners: their options, and starting and stopping their collectors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, ProgressBarCallback
from stable_baselines3.common.noise import VectorizedActionNoise

from sb3_extra_buffers.distributed.collector import CollectorPlan
from sb3_extra_buffers.distributed.intake import Intake, Statistics
from sb3_extra_buffers.distributed.limits import checked_number
from sb3_extra_buffers.distributed.transport import LocalTransport, Transport
from sb3_extra_buffers.errors import ArgumentError, ConfigurationError

_DEFAULTS: dict[str, Any] = {
    "n": 2,
    "envs": 1,
    "make_env": None,
    "segment_steps": 32,
    "ahead": 2,
    "samples_per_insert": None,
    "sync_every": 100,
    "algorithm_kwargs": None,
    "buffer_kwargs": None,
    "actor_options": None,
    "in_process": False,
}
"""The options of ``collectors``; see :func:`.distributed`."""
_LEARNER_ARGUMENTS = ("policy", "env", "collectors", "ray", "_init_setup_model")
"""Arguments that are only for the learner, or that collectors get in another way."""
_BUFFER_ARGUMENTS = ("optimize_memory_usage", "n_steps")
"""Arguments that collectors do not inherit, because their buffers differ from the learner's."""


class Learner(BaseAlgorithm):
    """What ``distributed()`` adds to every algorithm."""

    collectors: dict[str, Any] | None
    _algorithm: type[BaseAlgorithm]
    _unused_options: ClassVar[tuple[str, ...]] = ()
    """Options of ``collectors`` that the algorithm does not accept."""

    def __init__(
        self,
        policy: Any,
        env: Any,
        *args: Any,
        collectors: Mapping[str, Any] | None = None,
        ray: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        bound = inspect.signature(self._algorithm.__init__).bind_partial(None, policy, env, *args, **kwargs).arguments
        given = {name: value for name, value in list(bound.items())[1:] if name not in _LEARNER_ARGUMENTS}
        self.ray = dict(ray or {})
        self.collectors = None if collectors is None else self._checked(collectors, env)
        self._collector_arguments = {**given, "policy": policy}
        self._collector_starts = [0] * (self.collectors["n"] if self.collectors else 0)
        """How often each collector was started. Seeds depend on it, so that no collector repeats earlier steps."""
        self._intake: Intake | None = None
        self.collector_statistics: Statistics | None = None
        """Statistics of the current or the last call of ``learn``."""
        super().__init__(policy, env, *args, **kwargs)

    @classmethod
    def load(cls, path: Any, *args: Any, collectors: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        """Load a model as the algorithm does. ``collectors`` replaces the options with which it was saved."""
        if collectors is not None:
            kwargs["collectors"] = cls._checked(collectors, None)
        return super().load(path, *args, **kwargs)

    def set_env(self, env: Any, force_reset: bool = True) -> None:
        if self.collectors is None:
            super().set_env(env, force_reset)
            return
        # The learner only reads the spaces of its environment, so the number of environments may be any.
        n_envs, env = self.n_envs, self._wrap_env(env, self.verbose)
        self.n_envs = env.num_envs
        try:
            super().set_env(env, force_reset)
        finally:
            self.n_envs = n_envs
        self._refuse_normalization()

    @classmethod
    def _checked(cls, collectors: Mapping[str, Any], env: Any) -> dict[str, Any]:
        allowed = [name for name in _DEFAULTS if name not in cls._unused_options]
        if unknown := sorted(collectors.keys() - set(allowed)):
            raise ArgumentError(
                f"collectors has no option {unknown[0]!r} for {cls._algorithm.__name__}. "
                f"There are: {', '.join(allowed)}."
            )
        options = {**_DEFAULTS, **collectors}
        for name in ("n", "envs", "segment_steps", "ahead", "sync_every"):
            options[name] = checked_number(f"{name} of collectors", options[name])
        ratio = options["samples_per_insert"]
        if ratio is not None and not 0 < ratio < math.inf:
            raise ConfigurationError(f"samples_per_insert must be a number above 0, not {ratio!r}.")
        if options["make_env"] is None:
            if not isinstance(env, str):
                raise ConfigurationError(
                    "Collectors need a function that makes their environments: pass make_env in collectors."
                )
            options["make_env"] = partial(gym.make, env)
        return options

    def _refuse_normalization(self) -> None:
        if self._vec_normalize_env is not None:
            raise ConfigurationError(
                "Collectors have environments of their own, so the statistics of a VecNormalize of the learner "
                "would not change. Normalize observations in make_env."
            )

    def learn(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().learn(*args, **kwargs)  # type: ignore[safe-super]  # the algorithm's
        finally:
            if self._intake is not None:
                self._intake.transport.stop()
                self._intake = None

    def _init_callback(self, callback: Any, progress_bar: bool = False) -> BaseCallback:
        if self.collectors is not None and progress_bar:
            callbacks = CallbackList([super()._init_callback(callback), _ProgressBar()])
            callbacks.init_callback(self)
            return callbacks
        return super()._init_callback(callback, progress_bar)

    def _different_arguments(self) -> list[dict[str, Any]]:
        """For each collector, the arguments of the algorithm that differ from the learner's."""
        assert self.collectors is not None
        given, n = self.collectors["algorithm_kwargs"] or {}, self.collectors["n"]
        different = [dict(given(number, n)) if callable(given) else dict(given) for number in range(n)]
        known = inspect.signature(self._algorithm.__init__).parameters
        if unknown := {name for each in different for name in each}.difference(known):
            raise ArgumentError(f"algorithm_kwargs: {self._algorithm.__name__} has no argument {min(unknown)!r}.")
        return different

    def _inherited_arguments(self) -> dict[str, Any]:
        """The arguments of the algorithm that collectors inherit."""
        # As in SB3's load(), attributes are arguments, and may have changed since the learner was created.
        names = inspect.signature(self._algorithm.__init__).parameters.keys() & vars(self).keys()
        now = {name: vars(self)[name] for name in names.difference(_LEARNER_ARGUMENTS)}
        if isinstance(noise := now.get("action_noise"), VectorizedActionNoise):
            now["action_noise"] = noise.base_noise  # collectors make one for their own environments
        arguments = {**self._collector_arguments, **now}
        return {name: value for name, value in arguments.items() if name not in _BUFFER_ARGUMENTS}

    def _start_intake(self, buffer: Any, arguments: dict[str, Any], n_steps: int, ahead: int) -> Intake:
        """Start the collectors.

        :param buffer: Segments are appended to ``buffer.parts``, which has one part for each collector.
        :param arguments: Arguments of the collectors' algorithms that override those of the learner.
        :param n_steps: Number of steps of a segment or rollout.
        """
        assert self.collectors is not None
        n, n_envs = self.collectors["n"], self.collectors["envs"]
        found = [part.n_envs for part in getattr(buffer, "parts", ())]
        if found != [n_envs] * n:
            raise ConfigurationError(
                f"{n} collectors of {n_envs} environments each need a buffer with {n} parts of {n_envs} environments, "
                f"but this {type(buffer).__name__} has parts of {found} environments. Change n and envs of collectors, "
                "or the buffer."
            )
        self._collector_starts = [*self._collector_starts, *[0] * n][:n]  # load() may have changed the number
        transport: Transport
        if self.collectors["in_process"]:
            transport = LocalTransport()
        else:
            from sb3_extra_buffers.distributed.ray_transport import RayTransport

            transport = RayTransport(self.ray, self.collectors["actor_options"])
        plan = CollectorPlan(
            self._algorithm,
            {**self._inherited_arguments(), **arguments},
            self._different_arguments(),
            self.collectors["make_env"],
            self.collectors["envs"],
            n_steps,
        )
        self._intake = intake = Intake(transport, buffer, self.seed, ahead, self._collector_starts)
        self.collector_statistics = intake.statistics
        intake.start(plan)
        return intake

    def _record_collectors(self) -> None:
        """Pass the statistics of the collectors to the logger."""
        if self._intake is not None:
            for name, value in self._intake.statistics.scalars().items():
                self.logger.record(f"collectors/{name}", value)
            self.logger.record("collectors/steps_waiting", self._intake.n_waiting)

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_intake"]


class _ProgressBar(ProgressBarCallback):
    """A progress bar that counts the steps of collectors. SB3's counts those of the learner's own environments."""

    def _on_step(self) -> bool:
        self.pbar.update(self.model.n_envs)
        return True
