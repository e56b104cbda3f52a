"""``none``: records as they are."""

from __future__ import annotations

from sb3_extra_buffers.codecs.base import Bytes, Codec
from sb3_extra_buffers.errors import CorruptDataError


class NoneCodec(Codec):
    """No compression. The store still shares frames, which is where most of the memory goes."""

    name = "none"

    def _encode_record(self, record: Bytes) -> Bytes:
        return record

    def _decode_record(self, payload: Bytes) -> Bytes:
        raise CorruptDataError(f"A raw record has {self.record_bytes} bytes, not {len(payload)}.")
