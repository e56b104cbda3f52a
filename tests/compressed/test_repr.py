"""What a buffer looks like in a notebook or a log."""

from __future__ import annotations

import pytest
from gymnasium import spaces

from sb3_extra_buffers.compressed import CompressedReplayBuffer
from sb3_extra_buffers.errors import ConfigurationError
from tests.persistence.buffers import ALL_CLASSES, N_ENVS, SLOTS, add, make, steps_for


@pytest.mark.parametrize("name", ALL_CLASSES)
def test_every_class(name: str) -> None:
    buffer = make(name, compression_method="rle")
    assert repr(buffer).startswith(f"{name}(0 of {SLOTS * N_ENVS} transitions, n_envs={N_ENVS}, ")
    for number, step in enumerate(steps_for(buffer, 5)):
        add(buffer, step, number)
    text = repr(buffer)
    assert text.startswith(f"{name}({5 * N_ENVS} of {SLOTS * N_ENVS} transitions, ")
    assert f"observations={buffer.observation_space}, actions={buffer.action_space}, " in text
    assert "rle" in text
    assert text.endswith("B')")


def test_of_a_buffer_that_was_never_made() -> None:
    """As a debugger shows it."""
    buffer = CompressedReplayBuffer.__new__(CompressedReplayBuffer)
    assert "CompressedReplayBuffer object" in repr(buffer)
    with pytest.raises(ConfigurationError):
        buffer.__init__(-1, spaces.Discrete(2), spaces.Discrete(2))  # type: ignore[misc]
    assert "CompressedReplayBuffer object" in repr(buffer)
