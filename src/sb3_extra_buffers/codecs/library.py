"""What codecs around a compression library have in common.

Such a library turns one buffer into ``bytes`` and back, with the interpreter's lock released; what is left to do is to
call it for every record at little cost and to turn its errors into ours.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from sb3_extra_buffers.codecs.base import Bytes, FrameSpec, Indices, RecordCodec
from sb3_extra_buffers.codecs.method import Method
from sb3_extra_buffers.errors import CorruptDataError


class LibraryCodec(RecordCodec):
    """A codec with compression levels whose work is done by a library."""

    not_pickled: ClassVar[tuple[str, ...]] = ("_library",)
    """Attributes that :meth:`_connect` sets: modules and handles."""

    compresslevel: int

    def __init__(self, frame: FrameSpec, compresslevel: int) -> None:
        super().__init__(frame)
        self.compresslevel = compresslevel
        self._connect()

    @property
    def label(self) -> str:
        return str(Method(self.name, self.compresslevel))

    @abstractmethod
    def _connect(self) -> None:
        """Import the library and set up what cannot be pickled."""

    @property
    @abstractmethod
    def _errors(self) -> tuple[type[Exception], ...]:
        """What the library raises when bytes are corrupt."""

    @abstractmethod
    def _decompress(self, payload: memoryview) -> bytes:
        """The inverse of :meth:`_encode_record`. The result's length is checked by the caller."""

    def decode(self, data: Bytes, starts: Indices, lengths: Indices, references: Indices, out: Bytes) -> None:
        self._decode_with(self._decompress, data, starts, lengths, out)

    def _decode_with(
        self, decompress: Callable[[memoryview], bytes], data: Bytes, starts: Indices, lengths: Indices, out: Bytes
    ) -> None:
        # Views of memory instead of arrays save more than a microsecond per record, a fifth of the whole for zstd.
        source = data.data
        record_bytes = self.record_bytes
        # A result of the wrong length does not fit into its row, which is a ValueError.
        errors: tuple[type[Exception], ...] = (ValueError, *self._errors)
        try:
            for row, start, length in zip(out, starts.tolist(), lengths.tolist(), strict=True):
                payload = source[start : start + length]
                row.data[:] = payload if length == record_bytes else decompress(payload)
        except errors as error:
            raise CorruptDataError(f"The {self.name} record at byte {start} does not decode: {error}.") from error

    def _decode_record(self, payload: Bytes) -> Bytes:
        return np.frombuffer(self._decompress(payload.data), dtype=np.uint8)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self.not_pickled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._connect()
