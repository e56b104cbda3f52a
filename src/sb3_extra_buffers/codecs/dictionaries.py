"""What ``zstd-dict`` and ``delta-zstd`` share: dictionaries by reference number, and whether one still serves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sb3_extra_buffers.codecs.base import Indices
from sb3_extra_buffers.codecs.libzstd import MISSING, Dictionary


class DictionaryTable(dict[int, Dictionary]):
    """Dictionaries by reference number. Several references may have the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: Indices = np.zeros(1, dtype=np.int64)
        """The addresses of the dictionaries by reference number; see :mod:`.libzstd`."""

    def __setitem__(self, reference: int, dictionary: Dictionary) -> None:
        if reference >= len(self.addresses):
            more = reference + 1  # twice the room, as kernels have to be told of every new array
            self.addresses = np.append(self.addresses, np.full(more, MISSING))
        super().__setitem__(reference, dictionary)
        self.addresses[reference] = dictionary.address

    def forget(self, references: Indices) -> None:
        """Free the dictionaries of these references."""
        for reference in self.keys() & references.tolist():
            self.addresses[reference] = MISSING  # before the memory is freed
            del self[reference]


@dataclass
class CompressedSizes:
    """The sizes of records since a dictionary was made. The first ones are the baseline for later ones."""

    baseline_records: int
    """The number of records in the baseline."""
    n_records: int = 0
    bytes_before: int = 0
    """The bytes of the baseline's records before compression, and below, after compression."""
    bytes_after: int = 0
    excess: float = 0.0
    """How many bytes more later records take than they would at the baseline's ratio."""

    def add(self, n_records: int, before: int, after: int) -> None:
        """Add records, given their number and their bytes before and after compression."""
        if self.n_records < self.baseline_records:
            self.n_records += n_records
            self.bytes_before += before
            self.bytes_after += after
        else:
            self.excess = max(0.0, self.excess + after - before * self.bytes_after / self.bytes_before)
