"""Constants of the ``delta`` format, described in :mod:`.delta`, for its plain and its compiled form."""

KIND_SHIFT = 30
"""The two highest bits of a frame's count say what its changes are relative to."""
COUNT_MASK = (1 << KIND_SHIFT) - 1

PREVIOUS = 0
REFERENCE = 1
ZERO = 2
WHOLE = 3
