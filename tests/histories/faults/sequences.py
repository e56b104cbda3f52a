"""Faults of buffers that sample sequences."""

from __future__ import annotations

from tests.histories.faults.fault import Fault

SEQUENCES = ("CompressedSequenceReplayBuffer", "CompressedDictSequenceReplayBuffer")
BY_PRIORITY = ("CompressedPrioritizedSequenceReplayBuffer",)
ON_DEVICE = ("GpuSequenceReplayBuffer", "GpuDictSequenceReplayBuffer")
SEQUENCE_FAULTS = [
    Fault(
        "a padded sequence has only burn-in",
        "compressed/sequence_index.py",
        "last - shape.burn_in + 1, shape.stride)",
        "last + 1, shape.stride)",
        SEQUENCES,
    ),
    Fault(
        "the first slot stays the beginning of a sequence when it is overwritten",
        "compressed/sequence_index.py",
        "            removed = self.anchors.remove(slot)\n",
        "            removed = self.anchors.remove(slot) if slot else removed\n",
        SEQUENCES,
    ),
    Fault(
        "a loaded buffer takes episodes that have ended for open ones",
        "compressed/sequence_index.py",
        'state.array("is_open", np.bool_, (self.n_envs,)).copy()',
        'np.ones_like(state.array("is_open", np.bool_, (self.n_envs,)))',
        SEQUENCES,
    ),
    Fault(
        "the online queue hands out the newest environment first",
        "compressed/sequence_index.py",
        "env = int(ages.argmax())",
        "env = int(np.where(queue.counts > 0, ages, self.n_slots).argmin())",
        SEQUENCES,
    ),
    Fault(
        "a sequence goes on past a gap",
        "compressed/sequence_buffer.py",
        "is_gap &= ~self._follows(previous, pos)",
        "is_gap[:] = False",
        SEQUENCES,
    ),
    Fault(
        "a change of the codec is taken for a gap",
        "compressed/sequence_buffer.py",
        "shared[envs] = [a.tobytes() == b.tobytes() for a, b in zip(before, now, strict=True)]",
        "shared[envs] = False",
        SEQUENCES,
    ),
    Fault(
        "a padded sequence goes on past the newest step",
        "compressed/sequence_buffer.py",
        "is_first[1:] | (offsets[1:] > ages)",
        "is_first[1:] | (offsets[1:] > ages + 1)",
        SEQUENCES,
    ),
    Fault(
        "latents of overwritten steps are written to new ones",
        "compressed/sequence_buffer.py",
        "(steps >= n_added - self._index.n_stored)",
        "(steps >= 0)",
        SEQUENCES,
    ),
    Fault(
        "records of two environments are taken for the same",
        "storage/gathering.py",
        "numbers // group * n_lanes + lanes[:, None]",
        "numbers // group * n_lanes + lanes[:1, None]",
        SEQUENCES,
    ),
    Fault(
        "frames of two codecs are looked for in one of their stores",
        "storage/gathering.py",
        "rows = np.flatnonzero(are_together & (homes[0] == i))",
        "rows = np.flatnonzero(are_together & (homes[0] <= i))",
        (*SEQUENCES, *BY_PRIORITY),
    ),
    Fault(
        "a sequence with a repeated frame is decoded as if it had none",
        "storage/gathering.py",
        "(firsts[1:] == firsts[:-1] + 1)",
        "(firsts[1:] <= firsts[:-1] + 1)",
        SEQUENCES,
    ),
    Fault(
        "a sequence that was overwritten keeps its priority",
        "compressed/prioritized_sequence_buffer.py",
        "        self._tree[changes.removed] = 0.0\n",
        "        self._tree[changes.removed[1:]] = 0.0\n",
        BY_PRIORITY,
    ),
    Fault(
        "sequences on the device: latents go to other steps of the batch",
        "gpu_buffers/sequence_buffer.py",
        "np.unique(places[::-1], return_index=True)",
        "np.unique(places, return_index=True)",
        ON_DEVICE,
    ),
    Fault(
        "sequences on the device: padding shows a step",
        "gpu_buffers/sequence_buffer.py",
        ".masked_fill_(is_hidden, 0)",
        ".masked_fill_(is_hidden & False, 0)",
        ON_DEVICE,
    ),
    Fault(
        "sequences on the device: a step continues the one before if one of its keys does",
        "gpu_buffers/sequence_buffer.py",
        "self._continues = all(isinstance",
        "self._continues = any(isinstance",
        ON_DEVICE[1:],
    ),
    Fault(
        "sequences on the device: time limits are taken for terminal states",
        "gpu_buffers/sequence_buffer.py",
        '* (1 - self._fields.peek("timeouts")[where])',
        '* (1 - 0 * self._fields.peek("timeouts")[where])',
        ON_DEVICE,
    ),
]
