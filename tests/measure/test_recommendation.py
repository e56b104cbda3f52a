from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.measure.comparison import Comparison, Memory, Result
from sb3_extra_buffers.measure.play_file import PlayFile
from sb3_extra_buffers.measure.recommendation import recommend
from sb3_extra_buffers.measure.subjects import SB3, buffer_arguments, make_replay_buffer, sb3_bytes, usual_subjects

IMAGES = spaces.Box(0, 255, (4, 84, 84), np.uint8)


def comparison(space: spaces.Space = IMAGES, **figures: tuple[float, float]) -> Comparison:
    """Of SB3 with 1000 MB and 100 µs, and of methods with the memory and the time given."""
    play = PlayFile(Path("play"), 100, 1, space, spaces.Discrete(2))
    rows = {SB3: (1000.0, 100.0), **{name.replace("_", " "): figure for name, figure in figures.items()}}
    results = [
        Result(Memory(name, name, 100, int(size), size), buffer_bytes=size, add=0, sample=time)
        for name, (size, time) in rows.items()
    ]
    return Comparison(play, 5_000, 32, results)


@pytest.mark.parametrize(
    ("figures", "expected", "reason"),
    [
        ({"delta": (10, 90), "gzip1": (5, 300)}, "delta", "100.0 times smaller"),
        ({"delta": (10, 90), "auto": (11, 92)}, "auto", "needs no settings"),
        ({"delta": (10, 90), "auto": (30, 92)}, "delta", "the smallest of those that are as fast"),
        ({"zstd": (5, 109), "auto": (10, 50)}, "auto", "zstd is smaller still (200.0 times), but slower than this"),
        ({"zstd": (10, 500), "gzip1": (9, 900)}, "zstd", "take 5.0 times as long"),
        ({"none": (900, 90)}, SB3, "no method makes it 1.5 times smaller"),
    ],
    ids=[
        "fast and small",
        "auto is as good",
        "auto is not",
        "auto is the better compromise",
        "all are slow",
        "not worth it",
    ],
)
def test_what_is_recommended_and_why(figures: dict[str, tuple[float, float]], expected: str, reason: str) -> None:
    recommendation = recommend(comparison(**figures))
    assert recommendation.result.subject == expected
    assert reason in recommendation.reason


@pytest.mark.parametrize(
    ("space", "subject", "line"),
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
def test_the_lines_to_paste(space: spaces.Space, subject: str, line: str) -> None:
    code = recommend(comparison(space, **{subject: (10, 50)})).code
    imported, used = code.splitlines()
    assert used == f"model = {line}"
    exec(imported)  # there is such a class


@pytest.mark.parametrize("subject", ["zstd-5 fast", "auto x8", "gzip1 x8", "none indexed x0", ""])
def test_a_subject_that_means_nothing(subject: str) -> None:
    with pytest.raises(ConfigurationError):
        buffer_arguments(subject)


def test_usual_subjects_can_be_made_and_sb3_takes_what_is_said() -> None:
    rgb = spaces.Box(0, 255, (3, 20, 20), np.uint8)
    assert any("indexed" in subject for subject in usual_subjects(rgb))
    for subject in usual_subjects(rgb):
        make_replay_buffer(subject, 10, rgb, spaces.Discrete(2), 1)
    sb3 = make_replay_buffer(SB3, 10, rgb, spaces.Discrete(2), 1)
    arrays = [value for value in vars(sb3).values() if isinstance(value, np.ndarray)]
    assert sb3_bytes(10, rgb, spaces.Discrete(2)) == sum(array.nbytes for array in arrays)
