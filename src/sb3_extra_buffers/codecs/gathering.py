"""Gathering frames without coming back to Python for each record."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs import libzstd
from sb3_extra_buffers.codecs.base import Bytes, Indices
from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.errors import CorruptDataError
from sb3_extra_buffers.team import ALONE, Team, team_for
from sb3_extra_buffers.threads import run_in_slices

if TYPE_CHECKING:
    from sb3_extra_buffers.storage.frame_store import FrameStore

Words = npt.NDArray[np.uint32]

KERNELS = "sb3_extra_buffers.codecs.gather_kernels"
_NOTHING = np.zeros(0, dtype=np.int64)


def gather_chains(
    store: FrameStore, reference_frames: Words, lanes: Indices, firsts: Indices, outs: list[Bytes]
) -> bool:
    """:meth:`.Codec.gather` for delta or raw records; false if it cannot be done here."""
    return _gather(store, lanes, firsts, outs, reference_frames, 0, _NOTHING)


def gather_zstd(store: FrameStore, dictionaries: Indices, lanes: Indices, firsts: Indices, outs: list[Bytes]) -> bool:
    """:meth:`.Codec.gather` for records of libzstd with dictionaries at the given addresses; false if it cannot be."""
    decompress = libzstd.decompress_function()
    if decompress == 0:
        return False
    unused = np.zeros((1, 1), dtype=np.uint32)
    return _gather(store, lanes, firsts, outs, unused, decompress, dictionaries)


def decode_chains(
    reference_frames: Words, data: Bytes, starts: Indices, lengths: Indices, references: Indices, out: Bytes
) -> bool:
    """:meth:`.Codec.decode` for delta records, into ``(n, frames_per_record, frame_bytes)``; false without numba."""
    kernels = load_kernels(KERNELS)
    if kernels is None:
        return False
    done = kernels.decode_chains(data, starts, lengths, references, out, reference_frames)
    if done < len(starts):
        raise CorruptDataError(f"The record at byte {starts[done]} does not decode.")
    return True


def decode_zstd(
    dictionaries: Indices, data: Bytes, starts: Indices, lengths: Indices, references: Indices, out: Bytes
) -> bool:
    """:meth:`.Codec.decode` for records of libzstd with dictionaries at the given addresses; false if it cannot be."""
    decompress = libzstd.decompress_function()
    kernels = load_kernels(KERNELS)
    if decompress == 0 or kernels is None:
        return False
    with libzstd.contexts(1) as contexts:
        done = kernels.decode(data, starts, lengths, references, out, decompress, int(contexts[0]), dictionaries)
    if done < len(starts):
        raise CorruptDataError(f"The record at byte {starts[done]} does not decode.")
    return True


def _gather(
    store: FrameStore,
    lanes: Indices,
    firsts: Indices,
    outs: list[Bytes],
    reference_frames: Words,
    decompress: int,
    dictionaries: Indices,
) -> bool:
    kernels = load_kernels(KERNELS)
    if kernels is None or len(outs) > 2:
        return False

    def work(low: int, high: int, team: Team) -> bool:
        part = slice(low, high)
        where, outs_0, outs_1 = np.ascontiguousarray(firsts[:, part]), outs[0][part], outs[-1][part]

        def run(contexts: Indices) -> bool:
            done: bool = kernels.gather(
                lanes[part], where, outs_0, outs_1, store.ring, store.encoded, store.arena.data, store.starts,
                store.lengths, store.references, store.codec.frames_per_record, reference_frames, decompress,
                dictionaries, contexts, kernels.TAKE_PART, *team,
            )  # fmt: skip
            return done

        if not decompress:
            return run(_NOTHING)
        with libzstd.contexts(team.n_threads) as contexts:
            return run(contexts)

    n_bytes = sum(out.nbytes for out in outs)
    team = team_for(n_bytes)
    if team is not None:
        done = work(0, len(lanes), team)
    else:
        done = all(run_in_slices(lambda low, high: work(low, high, ALONE), len(lanes), n_bytes))
    if not done:
        raise CorruptDataError("Stored records do not decode.")
    return True
