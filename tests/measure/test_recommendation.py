from __future__ import annotations

from typing import Any

import click
import numpy as np
import pytest
from gymnasium import spaces

from sb3_extra_buffers.cli import app
from sb3_extra_buffers.errors import ConfigurationError
from sb3_extra_buffers.measure.buffers import SB3, Task, buffer_arguments, default_methods
from sb3_extra_buffers.measure.comparison import Comparison, Memory, Point, Result
from sb3_extra_buffers.measure.recommendation import buffer_kind, choose_algorithm, recommend
from tests.environments import SpaceEnv

IMAGES = spaces.Box(0, 255, (4, 84, 84), np.uint8)
SMALL = spaces.Box(0, 255, (3, 20, 20), np.uint8)
VECTORS = spaces.Box(-1, 1, (3,), np.float32)
FORCES = spaces.Box(-1, 1, (2,), np.float32)
TASK = Task("Replay", IMAGES, spaces.Discrete(2), 1)


def comparison(task: Task = TASK, **figures: tuple[float, float]) -> Comparison:
    """Of SB3 with 1000 MB and 100 µs, and of methods with the memory and the time given."""
    rows = {SB3: (1000.0, 100.0), **{name.replace("_", " "): figure for name, figure in figures.items()}}
    results = [
        Result(Memory(name, [Point(100, name, int(size))]), buffer_bytes=size, add=0, sample=time)
        for name, (size, time) in rows.items()
    ]
    return Comparison(task, 100, 5_000, 32, results)


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
            "with the default settings: 90.9x less memory at 1.09x SB3's speed.",
        ),
        ({"delta": (10, 90), "auto": (30, 92)}, "delta", "100.0x less memory"),
        (
            {"zstd": (5, 104), "auto": (10, 50)},
            "auto",
            "zstd uses even less memory (200.0x less than SB3), but is slower.",
        ),
        (
            {"zstd": (10, 500), "gzip1": (9, 900)},
            "zstd",
            "100.0x less memory at 0.20x SB3's speed. All methods that save memory are slower",
        ),
        (
            {"none": (250, 104)},
            "none",
            "4.0x less memory (frames are shared, not compressed) at about SB3's speed (0.96x).",
        ),
        (
            {"none": (900, 90)},
            SB3,
            "Compression does not pay off here: the smallest method, none, needs 0.90x SB3's memory at 1.11x its speed",
        ),
        ({"none": (1200, 125)}, SB3, "the smallest method, none, needs 1.20x SB3's memory at 0.80x its speed."),
        ({"gzip1": (600, 2000)}, SB3, "keep SB3's ReplayBuffer. Compression does not pay off"),
        (
            {"none": (250, 109)},
            "none",
            "at 0.92x SB3's speed. All methods that save memory are slower than SB3's buffer here",
        ),
        ({"zstd": (10.2, 91), "gzip1": (10, 90)}, "zstd", "98.0x less memory"),
        ({"gzip1": (10, 90), "zstd": (10.2, 91)}, "gzip1", "100.0x less memory"),
    ],
    ids=[
        "fast and small",
        "auto is as good",
        "auto is not",
        "auto is the better compromise",
        "all are slow",
        "no compression",
        "not small enough",
        "larger",
        "too slow for what it saves",
        "0.92x is not as fast",
        "equal within noise, so the first",
        "equal within noise, so the first, in another order",
    ],
)
def test_what_is_recommended_and_why(figures: dict[str, tuple[float, float]], expected: str, reason: str) -> None:
    recommendation = recommend(comparison(**figures))
    assert recommendation.result.method == expected
    assert reason in recommendation.text


@pytest.mark.parametrize(
    ("task", "method", "line"),
    [
        (TASK, "auto", 'DQN("CnnPolicy", env, buffer_size=5_000, replay_buffer_class=CompressedReplayBuffer)'),
        (
            Task("Replay", spaces.Dict({"a": IMAGES}), spaces.Discrete(2), 1),
            "zstd-dict/9_x8",
            'DQN("MultiInputPolicy", env, buffer_size=5_000, replay_buffer_class=CompressedDictReplayBuffer, '
            + 'replay_buffer_kwargs={"compression_method": "zstd-dict/9", '
            + '"compression_kwargs": {"frames_per_record": 8}})',
        ),
        (
            Task("Replay", SMALL, FORCES, 1),
            "auto",
            'SAC("MlpPolicy", env, buffer_size=5_000, replay_buffer_class=CompressedReplayBuffer)',
        ),
        (
            Task("Rollout", VECTORS, spaces.MultiBinary(3), 2),
            "none",
            'PPO("MlpPolicy", env, n_steps=2500, rollout_buffer_class=CompressedRolloutBuffer, '
            + 'rollout_buffer_kwargs={"compression_method": "none"})',
        ),
    ],
    ids=["auto", "options", "small images and continuous actions", "rollouts"],
)
@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
def test_the_lines_to_paste_run(task: Task, method: str, line: str) -> None:
    algorithm = choose_algorithm(task.action_space)
    code = recommend(comparison(task, **{method: (10, 50)}), algorithm).code
    assert code.splitlines()[-1] == f"model = {line}"
    pasted: dict[str, Any] = {"env": SpaceEnv(task.observation_space, task.action_space)}
    exec(code, pasted)
    buffer = getattr(pasted["model"], f"{task.kind.lower()}_buffer")
    assert type(buffer).__name__ == task.class_name(method)


def test_an_algorithm_that_does_not_fit_the_actions() -> None:
    with pytest.raises(
        ConfigurationError, match=r"DQN does not support Box actions\. Use --algo sac, td3, ppo or a2c\."
    ):
        choose_algorithm(FORCES, "dqn")
    assert choose_algorithm(FORCES, "a2c") == "a2c"


@pytest.mark.parametrize("command", ["bench", "estimate", "verify"])
def test_commands_offer_every_algorithm(command: str) -> None:
    (choice,) = [option.type for option in app.commands[command].params if option.name == "algo"]
    assert isinstance(choice, click.Choice)
    assert {buffer_kind(name) for name in choice.choices} == {"Replay", "Rollout"}


def test_memory_is_extrapolated_with_the_last_codec_only() -> None:
    """``auto`` changes the codec after 500 of 800 transitions, and needs 2 bytes a transition instead of 100."""
    points = [Point(100 * n, "gzip (auto)", 100 * 100 * n) for n in range(1, 6)]
    points += [
        Point(600, "delta (auto)", 50_150),
        Point(700, "delta (auto)", 50_350),
        Point(800, "delta (auto)", 50_550),
    ]
    memory = Memory("auto", points)
    assert memory.bytes_per_transition == 2
    assert memory.for_buffer_of(1_800) == 50_550 + 1_000 * 2


@pytest.mark.parametrize("method", ["zstd-5 fast", "auto x8", "gzip1 x8", "none indexed x0", ""])
def test_a_method_that_means_nothing(method: str) -> None:
    with pytest.raises(ConfigurationError):
        buffer_arguments(method)


def test_default_methods_can_be_made() -> None:
    rgb = spaces.Box(0, 255, (3, 20, 20), np.uint8)
    assert any("indexed" in method for method in default_methods(rgb))
    task = Task("Replay", rgb, spaces.Discrete(2), 1)
    for method in default_methods(rgb):
        task.make(method, 10)


@pytest.mark.parametrize("kind", ["Replay", "Rollout"])
@pytest.mark.parametrize("space", [IMAGES, VECTORS, spaces.Dict({"a": SMALL, "b": VECTORS})])
def test_the_size_of_sb3s_buffer_is_that_of_its_arrays(kind: Any, space: spaces.Space) -> None:
    task = Task(kind, space, spaces.Discrete(2), 2)
    arrays: list[Any] = []
    for value in vars(task.make(SB3, 20)).values():
        arrays += value.values() if isinstance(value, dict) else [value]
    assert task.sb3_bytes(20) == sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
