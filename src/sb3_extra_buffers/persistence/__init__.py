"""Saving buffers: :mod:`.files` saves and loads, :mod:`.folder` keeps them on disk, :mod:`.container` is the format."""
