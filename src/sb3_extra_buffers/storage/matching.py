"""Which frames of an observation are new?

A new observation is compared with the newest one of its lane. If they are equal, nothing is stored: SB3 passes
``next_obs``, and then the same values as the next ``obs``. If the stack has moved on by one frame, only the last frame
is new. In the worst case, all frames are new. Only the bytes decide, so this is lossless whatever the environment does.

Observations are compared in memory order, because that is fast. SB3's image wrappers return images with a
channels-first shape, but with channels-last memory; see :class:`MemoryForm`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.state import SavedState, State
from sb3_extra_buffers.storage.stacking import MemoryForm

_KERNELS = "sb3_extra_buffers.storage.matching_kernels"


class NewestObservations:
    """The newest observation of each lane, to find out which frames of the next one are new."""

    def __init__(self, n_lanes: int, stack: int) -> None:
        self.stack = stack
        self.known = np.zeros(n_lanes, dtype=np.bool_)
        """For each lane, whether there is a newest observation to compare with."""
        self.memory: Bytes = np.empty((n_lanes, 0), dtype=np.uint8)
        """The newest observation of each lane, in its memory order."""
        self._form: MemoryForm | None = None
        self._masks = _masks(MemoryForm(1, 1, 1), stack)

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def append(
        self,
        lanes: Indices,
        memories: tuple[Bytes, ...],
        form: MemoryForm,
        ring: Bytes,
        heads: Indices,
        encoded: Indices,
    ) -> tuple[Indices, int]:
        """Append the new frames of each lane's observations to the ``ring`` of the lane.

        :param memories: One observation of each lane, or two: an observation and its successor.

        Returns the number of the frame after each observation's last one, ``(len(memories), len(lanes))``, and the
        largest number of frames that wait in any lane's ring.
        """
        self._prepare_for(memories[0], form)
        ends = np.empty((len(memories), len(lanes)), dtype=np.int64)
        kernels = load_kernels(_KERNELS)
        append = append_new_frames if kernels is None else kernels.append_new_frames
        waiting: int = append(
            lanes,
            memories[0],
            memories[-1],
            *form,
            self.stack,
            self._masks,
            self.memory,
            self.known,
            ring,
            heads,
            encoded,
            ends,
        )
        return ends, waiting

    def _prepare_for(self, memory: Bytes, form: MemoryForm) -> None:
        """Prepare for observations in this memory form."""
        if form != self._form:
            # Observations of different forms cannot be compared, so all are new. In practice, this happens once.
            masks, memory_size = _masks(form, self.stack), memory.shape[1]
            newest = np.empty((len(self.known), memory_size), dtype=np.uint8)
            self.known[:] = False
            # In one assignment: the kernel relies on them fitting each other, also after Ctrl-C.
            self._masks, self.memory, self._form = masks, newest, form

    def forget(self) -> None:
        self.known[:] = False

    def frames(self, lanes: Indices) -> Bytes:
        """The newest observations of ``lanes``, which must be known, as frames: ``(n, stack, frame_bytes)``."""
        assert self._form is not None
        pixels, chunk, item = self._form
        shape = (len(lanes), pixels, self.stack, chunk // item, item)
        return self.memory[lanes].reshape(shape).transpose(0, 2, 3, 1, 4).reshape(len(lanes), self.stack, -1)

    def state(self) -> State:
        form = None if self._form is None else list(self._form)
        return {"form": form, "known": self.known, "memory": self.memory}

    def restore(self, state: SavedState, frame_bytes: int) -> None:
        n_lanes = len(self.known)
        form = state.value("form")
        if form is None:
            return
        self.known = state.array("known", np.bool_, (n_lanes,))
        self.memory = state.array("memory", np.uint8, (n_lanes, self.stack * frame_bytes))
        if not isinstance(form, list) or len(form) != 3 or not all(type(size) is int and size > 0 for size in form):
            raise state.error("form", f"must be three numbers, not {form!r}")
        self._form = MemoryForm(*form)
        pixels, chunk, item = self._form
        if pixels * chunk != frame_bytes or chunk % item:
            raise state.error("form", f"is {form} for frames of {frame_bytes} bytes")
        self._masks = _masks(self._form, self.stack)


def _masks(form: MemoryForm, stack: int) -> npt.NDArray[np.uint64]:
    """For each number of new frames, a mask of the bytes of the others. It covers some pixels, and is repeated."""
    period = stack * form.chunk
    if form.pixels == 1:
        return np.zeros((stack, 1), dtype=np.uint64)
    n_bytes = math.lcm(period, 8) * max(1, 4096 // math.lcm(period, 8))
    frames = np.arange(n_bytes) % period // form.chunk
    selected = frames < (stack - np.arange(stack))[:, None]
    return np.where(selected, np.uint8(255), np.uint8(0)).view(np.uint64)


def append_new_frames(
    lanes: Indices,
    memory: Bytes,
    following: Bytes,
    pixels: int,
    chunk: int,
    item: int,
    stack: int,
    masks: npt.NDArray[np.uint64],
    newest: Bytes,
    known: npt.NDArray[np.bool_],
    ring: Bytes,
    heads: Indices,
    encoded: Indices,
    ends: Indices,
) -> int:
    """The reference implementation of the compiled kernel. It runs without numba, and does not need ``masks``.

    With one row in ``ends``, ``following`` is ignored.
    """
    shape = (pixels, stack, chunk // item, item)
    for observations, row_ends in zip((memory, following), ends, strict=False):
        for row, lane in enumerate(lanes.tolist()):
            observation, before = observations[row].reshape(shape), newest[lane].reshape(shape)
            new = 0 if known[lane] else stack
            while new < stack and not np.array_equal(observation[:, : stack - new], before[:, new:]):
                new += 1
            if new:
                known[lane] = False  # until the newest observation is written completely
                frames = observation[:, stack - new :].transpose(1, 2, 0, 3).reshape(new, -1)
                ring[lane, np.arange(heads[lane], heads[lane] + new) % ring.shape[1]] = frames
                heads[lane] += new
                newest[lane] = observations[row]
                known[lane] = True
            row_ends[row] = heads[lane]
    return int((heads[lanes] - encoded[lanes]).max())
