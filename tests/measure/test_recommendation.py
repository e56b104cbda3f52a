from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.measure.buffers import SB3, buffer_arguments, default_methods, make_replay_buffer, sb3_bytes
from sb3_extra_buffers.measure.comparison import Comparison, Memory, Result
from sb3_extra_buffers.measure.recommendation import recommend
from sb3_extra_buffers.measure.transitions import TransitionFile

IMAGES = spaces.Box(0, 255, (4, 84, 84), np.uint8)


def comparison(space: spaces.Space = IMAGES, **figures: tuple[float, float]) -> Comparison:
    """Of SB3 with 1000 MB and 100 µs, and of methods with the memory and the time given."""
    data = TransitionFile(Path("data"), 100, 1, space, spaces.Discrete(2))
    rows = {SB3: (1000.0, 100.0), **{name.replace("_", " "): figure for name, figure in figures.items()}}
    results = [
        Result(Memory(name, name, 100, int(size), size), buffer_bytes=size, add=0, sample=time)
        for name, (size, time) in rows.items()
    ]
    return Comparison(data, 5_000, 32, results)


@pytest.mark.parametrize(
    ("figures", "expected", "reason"),
    [
        (
            {"delta": (10, 90), "gzip1": (5, 300)},
            "delta",
            "with the method 'delta': 100.0x less memory at 1.11x SB3's speed.",
        ),
        (
            {"delta": (10, 90), "auto": (11, 92)},
            "auto",
            "with the default settings: 90.9x less memory at about 1.09x SB3's speed.",
        ),
        ({"delta": (10, 90), "auto": (30, 92)}, "delta", "100.0x less memory"),
        (
            {"zstd": (5, 109), "auto": (10, 50)},
            "auto",
            "zstd needs even less (200.0x less than SB3's), but is slower than this.",
        ),
        (
            {"zstd": (10, 500), "gzip1": (9, 900)},
            "zstd",
            "100.0x less memory at 0.20x SB3's speed. All methods that save memory are slower",
        ),
        (
            {"none": (250, 104)},
            "none",
            "4.0x less memory (frames are shared, not compressed) at about 0.96x SB3's speed.",
        ),
        (
            {"none": (900, 90)},
            SB3,
            "Compression does not pay off here: the smallest method still needs 0.90x SB3's memory, at 1.11x its speed",
        ),
        ({"gzip1": (600, 2000)}, SB3, "keep SB3's ReplayBuffer. Compression does not pay off"),
    ],
    ids=[
        "fast and small",
        "auto is as good",
        "auto is not",
        "auto is the better compromise",
        "all are slow",
        "no compression",
        "not small enough",
        "too slow for what it saves",
    ],
)
def test_what_is_recommended_and_why(figures: dict[str, tuple[float, float]], expected: str, reason: str) -> None:
    recommendation = recommend(comparison(**figures))
    assert recommendation.result.method == expected
    assert reason in recommendation.text


@pytest.mark.parametrize(
    ("space", "method", "line"),
    [
        (IMAGES, "auto", 'DQN("CnnPolicy", env, buffer_size=5_000, replay_buffer_class=CompressedReplayBuffer)'),
        (
            spaces.Dict({"a": IMAGES}),
            "zstd-dict/9_x8",
            'DQN("MultiInputPolicy", env, buffer_size=5_000, replay_buffer_class=CompressedDictReplayBuffer, '
            + 'replay_buffer_kwargs={"compression_method": "zstd-dict/9", '
            + '"compression_kwargs": {"frames_per_record": 8}})',
        ),
    ],
    ids=["auto", "options"],
)
def test_the_lines_to_paste(space: spaces.Space, method: str, line: str) -> None:
    code = recommend(comparison(space, **{method: (10, 50)})).code
    imported, used = code.splitlines()
    assert used == f"model = {line}"
    exec(imported)  # there is such a class


@pytest.mark.parametrize("method", ["zstd-5 fast", "auto x8", "gzip1 x8", "none indexed x0", ""])
def test_a_method_that_means_nothing(method: str) -> None:
    with pytest.raises(ConfigurationError):
        buffer_arguments(method)


def test_default_methods_can_be_made_and_sb3_takes_what_is_said() -> None:
    rgb = spaces.Box(0, 255, (3, 20, 20), np.uint8)
    assert any("indexed" in method for method in default_methods(rgb))
    for method in default_methods(rgb):
        make_replay_buffer(method, 10, rgb, spaces.Discrete(2), 1)
    sb3 = make_replay_buffer(SB3, 10, rgb, spaces.Discrete(2), 1)
    arrays = [value for value in vars(sb3).values() if isinstance(value, np.ndarray)]
    assert sb3_bytes(10, rgb, spaces.Discrete(2)) == sum(array.nbytes for array in arrays)
