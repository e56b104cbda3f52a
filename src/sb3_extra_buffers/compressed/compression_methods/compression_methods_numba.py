"""The import path of version 0.5."""

from sb3_extra_buffers.compressed.dtypes import init_jit as init_jit
