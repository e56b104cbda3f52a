"""What collectors and shards have in common: limits of waiting and of failures, and checks of numbers."""

from __future__ import annotations

import operator
from typing import Any

from sb3_extra_buffers.errors import ConfigurationError

LOG_WAIT_SECONDS = 5.0
"""Interval of warnings while the learner waits for collectors or shards."""
MAX_FAILURES = 5
"""After this many deaths of a collector or shard without a reply in between, the learner gives up."""


def checked_number(name: str, value: Any) -> int:
    """An integer from 1 on, also one of NumPy. Raises an error for anything else."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ConfigurationError(f"{name} must be a whole number from 1 on, not {value!r}.")
    return number
