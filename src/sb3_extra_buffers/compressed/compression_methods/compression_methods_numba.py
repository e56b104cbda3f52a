"""Where ``init_jit`` used to be. It is :func:`sb3_extra_buffers.compressed.init_jit` now."""

from __future__ import annotations

from sb3_extra_buffers.compressed.jit import init_jit

__all__ = ["init_jit"]
