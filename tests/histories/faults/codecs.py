"""Faults of the codecs."""

from __future__ import annotations

from tests.histories.faults.fault import BOTH, Fault

CHAINS = "codecs/chains.py"
ZSTD_DICT, DELTA_ZSTD = "codecs/zstd_dict.py", "codecs/delta_zstd.py"
DICTIONARIES = "codecs/dictionaries.py"
COUNTS = "codecs/references.py"
DELTA_ENCODE = "codecs/delta_encode_kernels.py"
DELTA_DECODE = "codecs/delta_kernels.py"
BITPACK, BITPACK_KERNELS = "codecs/bitpack.py", "codecs/bitpack_kernels.py"
PIXEL_LZ, PIXEL_LZ_KERNELS = "codecs/pixel_lz.py", "codecs/pixel_lz_kernels.py"
PACKED_FRAMES = "codecs/packed_frames_kernels.py"
GATHERING = "storage/gather_kernels.py"

CODEC_FAULTS = [
    Fault(
        "a reference frame is renewed in its old place",
        CHAINS,
        "number = self._uses.new()",
        "number = int(self._current[lane]) or self._uses.new()",
    ),
    Fault(
        "records use a reference frame without counting",
        CHAINS,
        "        references = self._current[lanes]\n        self._uses.incref(references)\n",
        "        references = self._current[lanes]\n",
    ),
    Fault(
        "records lean on other reference frames after a load",
        CHAINS,
        '{"frames": self._frames,',
        '{"frames": np.roll(self._frames, 1, axis=0),',
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
        "            self._dictionaries.forget(self._uses.decref(np.array([replaced])))",
        "            self._uses.decref(np.array([replaced]))\n"
        "            self._dictionaries.forget(np.array([replaced]))",
    ),
    Fault(
        "a dictionary is never forgotten",
        ZSTD_DICT,
        "        self._dictionaries.forget(self._uses.decref(references))",
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
        "the addresses of earlier dictionaries are lost when their table grows",
        DICTIONARIES,
        "            self.addresses = np.append(self.addresses, np.full(more, MISSING))",
        "            self.addresses = np.append(np.zeros_like(self.addresses), np.full(more, MISSING))",
    ),
    Fault(
        "delta-zstd: lanes keep references that stand for the dictionary before",
        DELTA_ZSTD,
        "            is_current = self._dictionaries.get(reference) is self._dictionary",
        "            is_current = True",
    ),
    Fault(
        "delta-zstd: a reference of another buffer gets the dictionary of this one",
        DELTA_ZSTD,
        "        self._dictionaries[number] = dictionary\n        return number",
        "        return number",
        BOTH,
        segments=True,
    ),
    Fault(
        "kernels decompress without the dictionary of a reference",
        DICTIONARIES,
        "        self.addresses[reference] = dictionary.address",
        "        self.addresses[reference] = 0",
    ),
    Fault(
        "delta-zstd: references have other dictionaries after a load",
        DELTA_ZSTD,
        "                self._dictionaries[reference] = used[number]",
        "                self._dictionaries[reference] = used[0]",
    ),
    Fault(
        "gathering: a record is decompressed over the frame that it is applied to",
        GATHERING,
        "    decompressed = scratch + 4 * store.n_words",
        "    decompressed = scratch + 2 * store.n_words * (store.n_references > 0)",
    ),
    Fault(
        "delta: a skip goes one byte too far",
        "codecs/memory_kernels.py",
        "            known += trailing_zeros(different)\n",
        "            known += trailing_zeros(different) + (known > 99)\n",
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
        "delta: a chain is entered at its second frame",
        DELTA_DECODE,
        "    while number > 0 and frame_header",
        "    while number > 1 and frame_header",
    ),
    Fault(
        "delta: the last literal of a step is left out",
        DELTA_DECODE,
        "            copy_some(frame + position, at, n_literals)",
        "            copy_some(frame + position, at, n_literals - (n_literals > 9))",
    ),
    Fault(
        "delta: copies repeat the wrong bytes",
        "codecs/memory_kernels.py",
        "    first, length = load64(target - distance), distance",
        "    first, length = load64(target - distance - 1), distance",
    ),
    Fault(
        "bitpack: blocks without differences lose their offset",
        BITPACK_KERNELS,
        "unpack_block(block, at, width, word >> 8, first",
        "unpack_block(block, at, width, word >> 8 if width else 0, first",
    ),
    Fault(
        "bitpack: the last bytes of a frame are left out",
        BITPACK_KERNELS,
        "    copy(target + position, at, size - position)\n",
        "    copy(target + position, at, (size - position) // 2)\n",
    ),
    Fault(
        "bitpack: a frame is taken from its neighbour in the record",
        PACKED_FRAMES,
        "        if i == number:",
        "        if i == number // 2 * 2:",
    ),
    Fault(
        "bitpack: predictors are in another order after a load",
        BITPACK,
        '        return {"predictors": self.predictors}',
        '        return {"predictors": self.predictors[[0, 2, 1, *range(3, N_PREDICTORS)]]}',
    ),
    Fault(
        "pixel-lz: runs are decoded from two pixels before",
        PIXEL_LZ_KERNELS,
        'builder.icmp_signed("==", distance, ir.Constant(INTEGER, 1))',
        'builder.icmp_signed("==", distance, ir.Constant(INTEGER, 2))',
    ),
    Fault(
        "pixel-lz: short distances are copied from beyond what they have written",
        PIXEL_LZ_KERNELS,
        "    if 1 < distance <= LONGEST_COPY:",
        "    if 1 < distance <= LONGEST_COPY // 2:",
    ),
    Fault(
        "pixel-lz: blue literals are the green ones",
        PIXEL_LZ_KERNELS,
        "copy16(third + literals, at + 2 * n_literals)",
        "copy16(third + literals, at + n_literals)",
    ),
    Fault(
        "pixel-lz: the last literals of a frame are left out",
        PIXEL_LZ_KERNELS,
        "    if done < n_pixels:",
        "    if done < n_pixels - 2:",
    ),
    Fault(
        "pixel-lz: planes are forgotten in a file",
        PIXEL_LZ,
        '        return {"planes": self.planes}',
        '        return {"planes": 1}',
    ),
    Fault(
        "gathering: a frame is copied without its last byte",
        GATHERING,
        "copy(target, source, size)",
        "copy(target, source, size - 1)",
    ),
    Fault(
        "gathering: a frame of the next observation is left out",
        GATHERING,
        "            if 0 <= place < task.stack:",
        "            if 0 <= place < task.stack - i:",
    ),
    Fault(
        "gathering: a frame that waits is taken from its neighbour",
        GATHERING,
        "lane * store.ring_size + number % store.ring_size",
        "lane * store.ring_size + (number + 1) % store.ring_size",
    ),
    Fault(
        "gathering: next observations are looked up among observations",
        GATHERING,
        "ends = source.ends_1 if column else source.ends_0",
        "ends = source.ends_0",
    ),
    Fault(
        "gathering: observations of an earlier codec are looked for in the newest store",
        GATHERING,
        "            homes[row] = home\n",
        "            homes[row] = numbers[row] if len(numbers) else 0\n",
    ),
    Fault(
        "gathering: an observation and its successor, by another codec, are read from one store",
        GATHERING,
        "is_here = base <= lowest and highest < end",
        "is_here = base <= lowest",
    ),
    Fault(
        "gathering: one row that the kernel leaves over is not filled",
        GATHERING,
        "left[0] = n_left",
        "left[0] = n_left - (n_left > 1)",
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
