"""``rle-jit``: the same bytes as ``rle``, but one compiled call per batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.codecs.availability import require
from sb3_extra_buffers.codecs.base import NO_REFERENCE, Bytes, Encoded, FrameSpec, Indices
from sb3_extra_buffers.codecs.rle import RleCodec, Unsigned
from sb3_extra_buffers.compiled import load_kernels
from sb3_extra_buffers.errors import CorruptDataError

_KERNELS = "sb3_extra_buffers.codecs.rle_kernels"


class RleJitCodec(RleCodec):
    """Run-length encoding with numba, which does not hold the GIL."""

    name = "rle-jit"

    def __init__(self, frame: FrameSpec, *, runs_type: npt.DTypeLike | None = None) -> None:
        super().__init__(frame, runs_type=runs_type)
        require("numba", "The compression method 'rle-jit'", "numba")
        self._no_runs: Unsigned = np.empty(0, dtype=self.runs_type)
        """An empty array, which tells the kernels the dtype of run lengths."""
        # Encode and decode one empty record, so that numba compiles for these dtypes now and not during training.
        blank = np.zeros((1, self.record_bytes), dtype=np.uint8)
        data, lengths, references = self.encode(blank, np.zeros(1, dtype=np.int64))
        self.decode(data, np.zeros_like(lengths), lengths, references, blank)

    def encode(self, records: Bytes, lanes: Indices) -> Encoded:
        elements = np.ascontiguousarray(records).view(self.element_type)
        if not elements.flags.aligned:
            elements = elements.copy()
        data = np.empty(records.size, dtype=np.uint8)
        lengths = np.empty(len(records), dtype=np.int64)
        kernels: Any = load_kernels(_KERNELS)
        size = kernels.encode(elements, self._no_runs, self.longest_run, data, lengths)
        return Encoded(data[:size], lengths, np.full(len(records), NO_REFERENCE))

    def decode(self, data: Bytes, starts: Indices, lengths: Indices, references: Indices, out: Bytes) -> None:
        in_place = out.flags.c_contiguous and out.ctypes.data % self.element_type.alignment == 0
        target = out if in_place else np.empty((len(out), self.record_bytes), dtype=np.uint8)
        elements = target.view(self.element_type)
        kernels: Any = load_kernels(_KERNELS)
        done = kernels.decode(np.ascontiguousarray(data), starts, lengths, self._no_runs, elements)
        if done < len(starts):
            raise CorruptDataError(f"The run-length record at byte {starts[done]} does not decode.")
        if not in_place:
            out[:] = target
