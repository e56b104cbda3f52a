"""The import path of version 0.5. See :mod:`sb3_extra_buffers.compressed.compatibility`."""

from sb3_extra_buffers.compressed.compatibility import CompressedArray as CompressedArray
