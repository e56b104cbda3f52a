"""Faults of the stores, the arena and the index."""

from __future__ import annotations

from tests.histories.faults.fault import REPLAY, ROLLOUT, Fault

ARENA = "storage/arena.py"
EXTENTS = "storage/extent_arena.py"
FRAMES = "storage/frame_store.py"
RECORDS = "storage/record_index.py"
INDEX = "storage/observation_index.py"
STORE = "storage/observation_store.py"
PLAIN = "storage/plain_store.py"
MATCHING = "storage/matching_kernels.py"

PLAIN_FAULTS = [
    Fault(
        "the last environment's next observation is always shared",
        PLAIN,
        "for env, part in enumerate(self._parts)",
        "for env, part in enumerate(self._parts[:-1])",
    ),
    Fault(
        "assigned observations change the step before",
        PLAIN,
        "        self._unshare(slot, lanes)\n        self._observed",
        "        self._observed",
    ),
    Fault(
        "a row in use counts as free",
        PLAIN,
        "if row >= self._own_start]",
        "if row]",
    ),
    Fault(
        "an assigned next observation of the newest step is not read",
        PLAIN,
        "        if slot == self._newest:\n",
        "        if slot == -1:\n",
    ),
    Fault(
        "a step out of turn takes the block of the newest",
        PLAIN,
        "            self._keep_newest(slot)\n",
        "",
    ),
    Fault(
        "the next observation of the newest step is read from the slot after it",
        PLAIN,
        "rows[is_newest] = self._rows_of_block()[envs[is_newest]]",
        "pass",
    ),
    Fault(
        "a slot that is overwritten keeps the rows of its next observations",
        PLAIN,
        "            self._index_bytes[first : first + 4 * self.n_envs] = self._rows_after(slot)\n",
        "",
    ),
    Fault(
        "a slot with a next observation of its own counts as shared",
        PLAIN,
        "            self._all_shared[previous] = 0\n",
        "",
    ),
]


STORAGE_FAULTS = [
    Fault(
        "a wrapped ring writes over its oldest bytes",
        ARENA,
        "if start + size >= self.tail:",
        "if start + size >= self.tail + 3:",
    ),
    Fault(
        "the memory of live records is returned to the system",
        ARENA,
        "            gaps.append((at, start))\n            at = end\n",
        "            gaps.append((at, start))\n            at = start\n",
    ),
    Fault("the ring wraps over its oldest bytes", ARENA, "elif size < self.tail:", "elif size < self.tail + 9:"),
    Fault(
        "growing a wrapped ring loses a byte",
        ARENA,
        "data[self.tail + step : self.wrap + step] = data[self.tail : self.wrap]",
        "data[self.tail + step : self.wrap + step - 1] = data[self.tail : self.wrap - 1]",
    ),
    Fault(
        "the ring frees a byte of its oldest record",
        ARENA,
        "            self.wrap = None\n        self.tail = start\n",
        "            self.wrap = None\n        self.tail = start + 1\n",
    ),
    Fault(
        "records that moved keep their old places",
        FRAMES,
        "where=starts >= boundary)",
        "where=starts > boundary)",
    ),
    Fault(
        "the index wraps one record too late",
        RECORDS,
        "return bool((stops - firsts).max() >= self.capacity)",
        "return bool((stops - firsts).max() > self.capacity)",
    ),
    Fault(
        "the index is stale after it has grown",
        RECORDS,
        "*self.entries(self.places(lanes, numbers))",
        "*self.entries(self.places(lanes, numbers % larger.capacity))",
    ),
    Fault(
        "records are released one frame too early",
        FRAMES,
        "keep_from = np.minimum(np.minimum(oldest, newest), self.encoded) // group",
        "keep_from = np.minimum(np.minimum(oldest, newest) + 1, self.encoded) // group",
    ),
    Fault(
        "references are released once too often",
        FRAMES,
        "gone = self.index.references_of(self.first_records, keep_from)",
        "gone = self.index.references_of(self.first_records, np.minimum(keep_from + 1, self.encoded // group))",
    ),
    Fault(
        "references are released once too seldom",
        FRAMES,
        "gone = self.index.references_of(self.first_records, keep_from)",
        "gone = self.index.references_of(self.first_records, keep_from)[1:]",
    ),
    Fault(
        "a reset releases a record that was never written",
        FRAMES,
        "        self.newest.forget()\n        self.release(self.encoded)\n",
        "        self.newest.forget()\n"
        "        self.heads = -(-self.heads // self.codec.frames_per_record) * self.codec.frames_per_record\n"
        "        self.encoded = self.heads.copy()\n"
        "        self.release(self.heads)\n",
        (*ROLLOUT, "CompressedMaskableRolloutBuffer"),
    ),
    Fault(
        "a reset leaves an unfinished record behind",
        FRAMES,
        "heads, encoded = first_records * group, first_records * group",
        "heads, encoded = first_records * group, self.heads",
        (*ROLLOUT, "CompressedMaskableRolloutBuffer"),
    ),
    Fault(
        "frames that wait are saved from the wrong place",
        FRAMES,
        '            "waiting": self.ring[self._waiting_places()],',
        '            "waiting": np.roll(self.ring, 1, axis=1)[self._waiting_places()],',
    ),
    Fault(
        "frames that wait when the codec changes are moved to the wrong place",
        FRAMES,
        "ring[self._waiting_places(n_frames)] = ",
        "ring[self._waiting_places(n_frames + 1)[0], self._waiting_places()[1] % n_frames] = ",
    ),
    Fault(
        "the newest observation of another lane is compared with",
        MATCHING,
        "observation, before = following[row] if which else memory[row], newest[lane]",
        "observation, before = following[row] if which else memory[row], newest[(lane + 1) % newest.shape[0]]",
    ),
    Fault(
        "a comparison leaves out the last bytes",
        MATCHING,
        "    rest = np.uint8(0)\n    for i in range(8 * n_words, size):\n        rest |= left[i] ^ right[i]\n",
        "    rest = np.uint8(0)\n    for i in range(8 * n_words, size - 1):\n        rest |= left[i] ^ right[i]\n",
        ("CompressedDictReplayBuffer", *REPLAY),
    ),
    Fault(
        "a comparison of stacks leaves out the last bytes",
        MATCHING,
        "        rest |= (left[i] ^ right[i]) & mask_bytes[i % mask_bytes.shape[0]]",
        "        rest |= (left[i] ^ right[i]) & mask_bytes[i % mask_bytes.shape[0]] & np.uint8(0)",
    ),
    Fault(
        "the usual step of four gray frames is told by its newest frame",
        MATCHING,
        "(some_next[i] & np.uint32(0xFFFFFF)) ^ (some_old[i] >> np.uint32(8))",
        "(some_next[i] & np.uint32(0xFF0000)) ^ ((some_old[i] >> np.uint32(8)) & np.uint32(0xFF0000))",
        REPLAY,
    ),
    Fault(
        "a frame is copied without its last byte",
        MATCHING,
        "        for i in range(chunk):\n            frame[i] = source[i]",
        "        for i in range(chunk - 1):\n            frame[i] = source[i]",
    ),
    Fault(
        "the oldest frames are searched where nothing has changed",
        STORE,
        "            self._is_current[slot // self._piece] = False\n",
        "",
    ),
    Fault(
        "observations are read from the lane beside",
        INDEX,
        "places, before = slots * self.n_envs + envs, slots",
        "places, before = slots * self.n_envs + (envs + 1) % self.n_envs, slots",
    ),
    Fault(
        "what an earlier codec stored goes too early",
        INDEX,
        "if (oldest < earlier.frames.heads).any()]",
        "if (oldest + 60 < earlier.frames.heads).any()]",
        ("CompressedNStepReplayBuffer", "CompressedReplayBuffer", "CompressedHerReplayBuffer"),
    ),
    Fault(
        "frames are renumbered by another number than the observations",
        INDEX,
        "            frames.first_records - shifts // group,",
        "            frames.first_records - shifts // group + 1,",
    ),
    Fault(
        "observations are stored anew in another lane",
        INDEX,
        "numbers = self.frames.append(lanes, found, self._oldest)",
        "numbers = self.frames.append(lanes[::-1], found, self._oldest)",
    ),
    Fault(
        "a stack is taken for one frame deeper",
        "storage/stacking.py",
        "best, best_hits = whole, len(before) // 2",
        "best, best_hits = StackLayout(shape, dtype, shape[0]), len(before) // 2",
        ("CompressedReplayBuffer", "CompressedRolloutBuffer", "CompressedHerReplayBuffer"),
    ),
    Fault(
        "frames of stacks with channels last are merged in the wrong order",
        "storage/stacking.py",
        "out.reshape(n, -1, self.stack, channels)[:] = pixels.swapaxes(1, 2)",
        "out.reshape(n, -1, self.stack, channels)[:] = pixels[:, ::-1].swapaxes(1, 2)",
    ),
    Fault(
        "a ring that no longer moves frees its newest bytes first",
        EXTENTS,
        "in ring._live_ranges[::-1] if",
        "in ring._live_ranges if",
        REPLAY,
    ),
    Fault(
        "a buffer on disk writes over what the last flush refers to",
        EXTENTS,
        "for start, end in sorted([*self._live, *self._held]):",
        "for start, end in sorted([*self._live]):",
        ("CompressedReplayBuffer", "CompressedNStepReplayBuffer", "CompressedDictReplayBuffer"),
    ),
]
