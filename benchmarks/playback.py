"""Play a recording back for any number of steps and environments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count, islice

import numpy as np

from benchmarks.recordings import Frames, Observations, Recording, Transition, transitions


def play_back(recording: Recording, steps: int, n_envs: int) -> Iterator[Transition]:
    """Yield ``steps`` steps of ``n_envs`` environments.

    Environments beyond the recorded ones play the same recording from other starting points. After each lap through the
    recording, every environment continues with what the next one recorded. So the same frames return to an environment
    only after as many laps as there are recorded environments, far beyond the frames that any codec looks back at.
    """
    groups = -(-n_envs // recording.n_envs)
    lanes = [_laps(recording, group * recording.steps // groups) for group in range(groups)]
    for together in islice(zip(*lanes, strict=True), steps):
        yield _first(n_envs, together[0] if groups == 1 else _side_by_side(together))


def _laps(recording: Recording, start: int) -> Iterator[Transition]:
    chunk = recording.new_chunk()
    for lap in count():
        order = np.roll(np.arange(recording.n_envs), -lap)
        for step, transition in enumerate(transitions(recording, start, chunk), start):
            last = step == recording.steps - 1
            yield _reordered(_end_episodes(transition) if last else transition, order) if lap or last else transition
        start = 0


def _end_episodes(transition: Transition) -> Transition:
    """Let a time limit end all episodes, because another game follows."""
    done = np.ones_like(transition.done)
    return transition._replace(done=done, infos=[{"TimeLimit.truncated": True} for _ in done])


def _reordered(transition: Transition, order: np.ndarray[tuple[int], np.dtype[np.intp]]) -> Transition:
    return _with_rows([transition], lambda parts: parts[0][order], [transition.infos[env] for env in order])


def _side_by_side(together: tuple[Transition, ...]) -> Transition:
    # concatenate() keeps the memory layout of its arguments: a channels-first view of channels-last memory.
    return _with_rows(together, np.concatenate, list(chain(*(transition.infos for transition in together))))


def _first(n_envs: int, transition: Transition) -> Transition:
    if len(transition.done) == n_envs:
        return transition
    return _with_rows([transition], lambda parts: parts[0][:n_envs], transition.infos[:n_envs])


def _with_rows(
    together: Sequence[Transition], change: Callable[[Sequence[Frames]], Frames], infos: list[dict[str, object]]
) -> Transition:
    """Apply ``change`` to each array of the transitions, for dicts to the arrays of each key."""

    def changed(parts: Sequence[Observations]) -> Observations:
        if isinstance(parts[0], dict):
            return {key: change([part[key] for part in parts]) for key in parts[0]}
        return change(parts)

    obs, next_obs, action, reward, done, _ = zip(*together, strict=True)
    return Transition(changed(obs), changed(next_obs), change(action), change(reward), change(done), infos)
