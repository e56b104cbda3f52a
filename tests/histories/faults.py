"""Small faults, each of a kind that was made or could be: an exact text of the library, and what it becomes.

A text that is not found exactly once is an error, so that a fault cannot get lost when the library changes.
"""

from __future__ import annotations

from typing import NamedTuple

REPLAY, ROLLOUT = ("CompressedReplayBuffer",), ("CompressedRolloutBuffer",)
BOTH = REPLAY + ROLLOUT
MANY = (*BOTH, "CompressedNStepReplayBuffer", "CompressedMaskableRolloutBuffer", "CompressedDictReplayBuffer")
DEVICE = ("GpuReplayBuffer", "GpuRolloutBuffer", "GpuDictReplayBuffer")


class Fault(NamedTuple):
    name: str
    file: str
    """In ``src/sb3_extra_buffers``."""
    old: str
    new: str
    buffers: tuple[str, ...] = MANY
    """Whose histories are searched for it, in this order."""
    kernels: bool = False
    """Whether it is in a kernel of Triton."""

    def plant(self, text: str) -> str:
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"The fault {self.name!r} fits {count} places of {self.file} instead of one: {self.old!r}")
        return text.replace(self.old, self.new)


ARENA, EXTENTS, FRAMES = "storage/arena.py", "storage/extent_arena.py", "storage/frame_store.py"
INDEX, STORE = "storage/observation_index.py", "storage/observation_store.py"
PLAIN = "storage/plain_store.py"
DELTA, ZSTD_DICT, COUNTS = "codecs/delta.py", "codecs/zstd_dict.py", "codecs/references.py"
DELTA_ENCODE, DELTA_DECODE = "codecs/delta_encode_kernels.py", "codecs/delta_kernels.py"
MATCHING, GATHERING = "storage/matching_kernels.py", "storage/gather_kernels.py"
KERNELS = "gpu_buffers/kernels/"

PLAIN_FAULTS = [
    Fault(
        "the last environment's next observation is always shared",
        PLAIN,
        "enumerate(range(0, len(before), size))",
        "enumerate(range(0, len(before) - size, size))",
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
        "own: list[int] = rows[rows >= self._first_free].tolist()",
        "own: list[int] = rows.tolist()",
    ),
    Fault(
        "an assigned next observation is not compared",
        PLAIN,
        "        if slot == self._newest:\n            self._newest_bytes = None\n",
        "",
    ),
    Fault(
        "a step out of turn takes the block of the newest",
        PLAIN,
        "            self._keep_newest(slot)\n",
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
        "where=self.starts >= boundary)",
        "where=self.starts > boundary)",
    ),
    Fault(
        "the index wraps one record too late",
        FRAMES,
        "return bool(records.max() + spare >= self.starts.shape[1])",
        "return bool(records.max() + spare > self.starts.shape[1])",
    ),
    Fault(
        "the index is stale after it has grown",
        FRAMES,
        "new[lanes, numbers % larger] = old[lanes, numbers % capacity]",
        "new[lanes, numbers % larger] = old[lanes, numbers % larger % capacity]",
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
        "gone = self.references_of(self.first_records, keep_from)",
        "gone = self.references_of(self.first_records, np.minimum(keep_from + 1, self.encoded // group))",
    ),
    Fault(
        "references are released once too seldom",
        FRAMES,
        "gone = self.references_of(self.first_records, keep_from)",
        "gone = self.references_of(self.first_records, keep_from)[1:]",
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
        "            first_records * group,\n            first_records * group,\n",
        "            first_records * group,\n            self.heads,\n",
        (*ROLLOUT, "CompressedMaskableRolloutBuffer"),
    ),
    Fault(
        "frames that wait are saved from the wrong place",
        FRAMES,
        "return lanes, numbers % self.ring.shape[1]",
        "return lanes, (numbers + 1) % self.ring.shape[1]",
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
        "row[:] = self.ends[column].reshape(-1).take(slots * self.n_envs + envs)",
        "row[:] = self.ends[column].reshape(-1).take(slots * self.n_envs + (envs + 1) % self.n_envs)",
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
        "a buffer on disk writes over what the last flush refers to",
        EXTENTS,
        "for start, end in sorted([*self._live, *self._held]):",
        "for start, end in sorted([*self._live]):",
        ("CompressedReplayBuffer", "CompressedNStepReplayBuffer", "CompressedDictReplayBuffer"),
    ),
]
CODEC_FAULTS = [
    Fault(
        "a reference frame is renewed in its old place",
        DELTA,
        "number = self._uses.new()",
        "number = int(self._current[lane]) or self._uses.new()",
    ),
    Fault(
        "records use a reference frame without counting",
        DELTA,
        "        references = self._current[lanes]\n        self._uses.incref(references)\n",
        "        references = self._current[lanes]\n",
    ),
    Fault(
        "records lean on other reference frames after a load",
        DELTA,
        '            "frames": self._frames,',
        '            "frames": np.roll(self._frames, 1, axis=0),',
    ),
    Fault(
        "a number in use is given out again",
        COUNTS,
        "free = np.flatnonzero(self._uses == 0)",
        "free = np.flatnonzero(self._uses <= 1)[1:]",
    ),
    Fault(
        "a dictionary is forgotten while records need it",
        ZSTD_DICT,
        "            self._drop(self._uses.decref(np.array([replaced])))",
        "            self._uses.decref(np.array([replaced]))\n            self._drop(np.array([replaced]))",
    ),
    Fault(
        "a dictionary is never forgotten",
        ZSTD_DICT,
        "        self._drop(self._uses.decref(references))",
        "        self._uses.decref(references)",
    ),
    Fault(
        "records are noted with the dictionary before",
        ZSTD_DICT,
        "        self._collect(records)\n        data, lengths, _ = super().encode(records, lanes)\n"
        "        references = np.full(len(records), self._current)",
        "        before = self._current\n        self._collect(records)\n"
        "        data, lengths, _ = super().encode(records, lanes)\n"
        "        references = np.full(len(records), before)",
    ),
    Fault(
        "the addresses of dictionaries are stale after a renewal",
        ZSTD_DICT,
        '        self._content, self._samples = b"", []\n        self._addresses = None\n',
        '        self._content, self._samples = b"", []\n',
    ),
    Fault(
        "delta: a skip goes one byte too far",
        DELTA_ENCODE,
        "            length += trailing_zeros(different)\n",
        "            length += trailing_zeros(different) + (length > 99)\n",
    ),
    Fault(
        "delta: a match is one byte too long",
        DELTA_ENCODE,
        "is_match, source, length = True, best_source, best",
        "is_match, source, length = True, best_source, best + (best < min(30, size - at))",
    ),
    Fault(
        "delta: a long skip loses a byte",
        DELTA_ENCODE,
        "steps, length = steps + 2, length - LONGEST_SKIP",
        "steps, length = steps + 2, length - LONGEST_SKIP - 1",
    ),
    Fault(
        "delta: a long match forgets its extra byte",
        DELTA_DECODE,
        "                length += load8(at)\n                at += 1",
        "                at += 1",
    ),
    Fault(
        "delta: a frame after zeros is made from the frame before",
        DELTA_DECODE,
        "    elif kind == ZERO:",
        "    elif kind == ZERO and size < 0:",
    ),
    Fault(
        "delta: the last literal of a step is left out",
        DELTA_DECODE,
        "            copy(frame + position, at, n_literals)",
        "            copy(frame + position, at, n_literals - (n_literals > 9))",
    ),
    Fault(
        "delta: copies repeat the wrong bytes",
        "codecs/memory_kernels.py",
        "        byte = load8(target - 1)\n",
        "        byte = load8(target - 2)\n",
    ),
    Fault(
        "gathering: a frame is copied without its last byte",
        GATHERING,
        "            target = outs_0[row, place]\n            for byte in range(frame_bytes):",
        "            target = outs_0[row, place]\n            for byte in range(frame_bytes - 1):",
    ),
    Fault(
        "gathering: a frame of the next observation is left out",
        GATHERING,
        "            place = number - firsts[1, row]\n            if 0 <= place < stack:",
        "            place = number - firsts[1, row]\n            if 0 <= place < stack - 1:",
    ),
    Fault(
        "gathering: a frame that waits is taken from its neighbour",
        GATHERING,
        "source = ring[lane, number % ring.shape[1]]",
        "source = ring[lane, (number + 1) % ring.shape[1]]",
    ),
    Fault(
        "rle: a run is one element short where it is longest",
        "codecs/rle_kernels.py",
        "limit = min(size, start + longest_run)",
        "limit = min(size, start + longest_run + 1)",
        (
            "CompressedReplayBuffer",
            "CompressedRolloutBuffer",
            "CompressedDictReplayBuffer",
            "CompressedHerReplayBuffer",
        ),
    ),
    Fault(
        "rle: the last element of a run is not written",
        "codecs/rle_kernels.py",
        "for target in range(position, position + run):",
        "for target in range(position, position + run - (run > 9)):",
    ),
    Fault(
        "indexed colour: the last pixel is not coloured",
        "codecs/indexed_kernels.py",
        "                    for pixel in range(pixels):\n                        plane[pixel]",
        "                    for pixel in range(pixels - 1):\n                        plane[pixel]",
        (
            "CompressedReplayBuffer",
            "CompressedRolloutBuffer",
            "CompressedNStepReplayBuffer",
            "CompressedPrioritizedReplayBuffer",
            "CompressedMaskableRolloutBuffer",
        ),
    ),
]
BUFFER_FAULTS = [
    Fault(
        "a time limit is not stored",
        "compressed/replay_buffer.py",
        'timeouts = [info.get("TimeLimit.truncated", False) for info in infos]',
        'timeouts = [info.get("TimeLimit.truncated", False) and env == 0 for env, info in enumerate(infos)]',
    ),
    Fault(
        "the second save leaves the old header",
        "persistence/container.py",
        "        _write_header(file, header)  # from here on never truncate",
        "        sync(file)  # from here on nothing may be taken away",
    ),
    Fault(
        "a full buffer does not say so",
        "compressed/replay_buffer.py",
        "            self.full = True\n            self.pos = 0",
        "            self.pos = 0",
    ),
    Fault(
        "the next observation of the last slot goes past the end",
        "compressed/replay_buffer.py",
        "following = (0, (last_slots + 1) % self.buffer_size) if self.optimize_memory_usage",
        "following = (0, np.minimum(last_slots + 1, self.buffer_size - 1)) if self.optimize_memory_usage",
    ),
    Fault(
        "a batch that was drawn before a reset is given out after it",
        "compressed/prefetch.py",
        "        self.wait()\n        self.forget()\n        yield",
        "        self.wait()\n        yield",
        ("CompressedReplayBuffer", "CompressedDictReplayBuffer"),
    ),
    Fault(
        "an n-step return goes on past the newest transition",
        "compressed/nstep_buffer.py",
        "is_last = (window[0] == (self.pos - 1) % self.buffer_size)",
        "is_last = (window[0] == (self.pos - 2) % self.buffer_size)",
        ("CompressedNStepReplayBuffer",),
    ),
    Fault(
        "a sum of priorities leaves out its last child",
        "compressed/sum_tree_kernels.py",
        "            for child in range(_FAN_OUT):\n                total += nodes[first + child]",
        "            for child in range(_FAN_OUT - 1):\n                total += nodes[first + child]",
        ("CompressedPrioritizedReplayBuffer",),
    ),
]
DEVICE_FAULTS = [
    Fault(
        "on the device: a lane's frames are released too early",
        "gpu_buffers/frame_store.py",
        "super().release(np.minimum(oldest, self.heads - self.layout.stack))",
        "super().release(np.minimum(oldest + 3, self.heads - self.layout.stack))",
        DEVICE[:2],
        kernels=True,
    ),
    Fault(
        "on the device: records are entered one place too far",
        "gpu_buffers/frame_store.py",
        "places = lanes * capacity + numbers % capacity",
        "places = lanes * capacity + (numbers + 1) % capacity",
        DEVICE[:2],
        kernels=True,
    ),
    Fault(
        "Triton: the last byte of a frame is not stored",
        KERNELS + "gather.py",
        "tl.store(out + base + byte, (values >> (8 * i)).to(tl.uint8), mask=mask & (byte < FRAME_BYTES))",
        "tl.store(out + base + byte, (values >> (8 * i)).to(tl.uint8), mask=mask & (byte < FRAME_BYTES - 1))",
        DEVICE[:2],
        kernels=True,
    ),
    Fault(
        "Triton, fields: a time limit counts as an end",
        KERNELS + "gather.py",
        "tl.store(dones + row, done * (1 - timeout))",
        "tl.store(dones + row, done)",
        DEVICE[:1],
        kernels=True,
    ),
    Fault(
        "Triton, delta: a change of the last word is left out",
        KERNELS + "delta.py",
        "mask &= place < n_words",
        "mask &= place < n_words - 1",
        DEVICE[:2],
        kernels=True,
    ),
    Fault(
        "Triton, rle: values are read one byte too far",
        KERNELS + "rle.py",
        "value = _load_integer(heap, values_at + run * ELEMENT_BYTES, mask, ELEMENT_BYTES, ELEMENT)",
        "value = _load_integer(heap, values_at + 1 + run * ELEMENT_BYTES, mask, ELEMENT_BYTES, ELEMENT)",
        DEVICE[:2],
        kernels=True,
    ),
    Fault(
        "Triton, append: the last byte of a frame is not stored",
        KERNELS + "append.py",
        "tl.store(ring + target + at, values, mask=at < SIZE)",
        "tl.store(ring + target + at, values, mask=at < SIZE - 1)",
        DEVICE[:2],
        kernels=True,
    ),
    Fault(
        "Triton, delta: a word is stored without its last byte",
        KERNELS + "delta.py",
        "store_integer(heap, words_at + 4 * rank, value, emitted, 4)",
        "store_integer(heap, words_at + 4 * rank, value, emitted, 3)",
        DEVICE[:2],
        kernels=True,
    ),
    Fault(
        "Triton, rle: the last run is one element short",
        KERNELS + "rle.py",
        "size = ((n_elements - last - 1) % LONGEST + 1).to(tl.int64)",
        "size = ((n_elements - last - 1) % LONGEST).to(tl.int64)",
        DEVICE[:2],
        kernels=True,
    ),
]
FAULTS = [*PLAIN_FAULTS, *STORAGE_FAULTS, *CODEC_FAULTS, *BUFFER_FAULTS, *DEVICE_FAULTS]
