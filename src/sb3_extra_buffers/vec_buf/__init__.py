"""One buffer that forwards to several others (experimental)."""

from __future__ import annotations

from sb3_extra_buffers.vec_buf.buffers import DummyVecRolloutBuffer

__all__ = ["DummyVecRolloutBuffer"]
