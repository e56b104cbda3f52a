"""Buffers on disk: :mod:`.files` saves and loads them, in the format of :mod:`.container`."""
