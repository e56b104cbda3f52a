"""The name of a history, and the plan that is drawn from it.

A name is ``buffer:method:world:steps:number``, such as ``CompressedReplayBuffer:delta:stack:800:3``. It seeds the
generator that draws options, sizes and the whole program.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces

from sb3_extra_buffers.codecs.registry import AUTO, available_methods, option_names
from sb3_extra_buffers.gpu_buffers import base as gpu_base
from tests.histories.worlds import DICT_SPACES, GOALS, SPACES
from tests.persistence.buffers import ALL_CLASSES

HOST_METHODS = [*available_methods(), AUTO]
DEVICE_METHODS = [*gpu_base.METHODS, AUTO]
LEARNING = ("delta", "delta-zstd", "zstd-dict", AUTO)
"""Methods that keep state besides records, such as dictionaries, and so could lose it."""
ACTIONS: dict[str, spaces.Space] = {
    "Discrete": spaces.Discrete(5),
    "Box": spaces.Box(-1, 1, (3,), np.float32),
    "float64": spaces.Box(-1, 1, (2,), np.float64),
    "MultiBinary": spaces.MultiBinary(3),
    "MultiDiscrete": spaces.MultiDiscrete([3, 256]),
}
RGB_WORLDS = ("RGB", "RGB of tiles", "stack of RGB", "stack of RGB, channels last")


@dataclass(frozen=True)
class Name:
    """The name of a history."""

    buffer: str
    method: str
    world: str
    steps: int
    number: int

    def __str__(self) -> str:
        return f"{self.buffer}:{self.method}:{self.world}:{self.steps}:{self.number}"

    @classmethod
    def parse(cls, text: str) -> Name:
        try:
            buffer, method, world, steps, number = text.split(":")
            name = cls(buffer, method, world, int(steps), int(number))
        except ValueError:
            raise ValueError(f"A history is named buffer:method:world:steps:number, not {text!r}.") from None
        if buffer not in ALL_CLASSES:
            raise ValueError(f"There is no buffer class {buffer!r}. The classes are: {', '.join(ALL_CLASSES)}.")
        return name

    @property
    def is_rollout(self) -> bool:
        return "Rollout" in self.buffer

    @property
    def on_device(self) -> bool:
        return self.buffer.startswith("Gpu")


@dataclass(frozen=True)
class Plan:
    """Everything that is drawn before the first step."""

    name: Name
    n_envs: int
    slots: int
    action_space: spaces.Space
    options: dict[str, Any]
    """Arguments that only our class accepts."""
    shared_options: dict[str, Any]
    """Arguments of both classes."""
    on_disk: bool
    shrunk: bool
    """Whether the library runs with small constants, so that rare events become frequent."""
    path: str
    """How steps reach the buffer. ``host``: by ``add``; ``segments``: in segments of another buffer. For GPU buffers:
    ``arrays`` or ``tensors`` in host memory, ``kernels`` (Triton's interpreter) or ``cuda``."""
    device: str
    writes_by_index: bool


def methods_of(buffer: str) -> list[str]:
    return DEVICE_METHODS if buffer.startswith("Gpu") else HOST_METHODS


def worlds_of(buffer: str) -> list[str]:
    """The worlds that fit a class."""
    if "Her" in buffer:
        return list(GOALS)
    return list(DICT_SPACES) if "Dict" in buffer else list(SPACES)


def draw_plan(name: Name, path: str | None = None) -> Plan:
    """Draw the plan of a history.

    :param path: Overrides the drawn :attr:`Plan.path`.
    """
    rng = np.random.default_rng(zlib.crc32(str(name).encode()))
    options = {**_storage_options(name, rng), **_class_options(name, rng)}
    shared = _shared_options(name, rng)
    n_envs = int(rng.integers(1, 5))
    slots = int(rng.choice([5, 17, 33, 64, 120]) if name.is_rollout else rng.choice([9, 40, 75, 130, 260]))
    on_disk = not (name.is_rollout or name.on_device) and rng.random() < 0.25
    drawn = str(rng.choice(["arrays", "arrays", "tensors"]))
    if name.on_device:
        slots = min(slots, 40)
    if not name.on_device:
        path = "segments" if path == "segments" else "host"
    elif path is None:
        path = "cuda" if th.cuda.is_available() and rng.random() < 0.7 else drawn
    if path == "kernels":
        n_envs, slots = 1, 9  # Triton's interpreter is slow
    return Plan(
        name,
        n_envs,
        slots,
        ACTIONS["Discrete" if "Maskable" in name.buffer else str(rng.choice(list(ACTIONS)))],
        options,
        shared,
        on_disk,
        bool(rng.random() < 0.8),
        path,
        "cuda" if path == "cuda" else "cpu",
        bool(rng.random() < 0.2),
    )


def _storage_options(name: Name, rng: np.random.Generator) -> dict[str, Any]:
    """Draw the options for storing observations."""
    method, codec_options = name.method, {}
    if method != AUTO and "frames_per_record" in option_names(method) and rng.random() < 0.7:
        codec_options["frames_per_record"] = int(rng.choice([1, 2, 3] if name.on_device else [1, 2, 3, 5, 8, 16]))
    if method not in (AUTO, "none") and name.world in RGB_WORLDS and not name.on_device and rng.random() < 0.5:
        codec_options["indexed_colour"] = True
    options: dict[str, Any] = {"compression_method": method, "compression_kwargs": codec_options or None}
    stack = rng.choice(["auto", "auto", "declared", "none"])
    if stack == "none" and not codec_options.get("indexed_colour"):  # a stack of RGB images is not RGB
        options["frame_stack"] = None
    elif stack == "declared" and name.world in ("stack", "stack, channels last"):
        options["frame_stack"] = int(rng.choice([4, 2]))
    if method.startswith("rle") and rng.random() < 0.7:
        options["dtypes"] = {"runs_type": np.uint8}  # so that some runs exceed the longest one
    if rng.random() < 0.15:
        options["verify"] = True
    if rng.random() < 0.15:
        options["normalize_images"] = True
    elif rng.random() < 0.15 and name.world in ("stack", "RGB", "tiny stack", "Dict of images"):
        options["output_dtype"] = "float"
    return options


def _class_options(name: Name, rng: np.random.Generator) -> dict[str, Any]:
    """Draw the options that only some classes have."""
    if "Sequence" in name.buffer:
        return _sequence_options(name, rng)
    options: dict[str, Any] = {}
    if "Prioritized" in name.buffer:
        options |= {"alpha": float(rng.choice([0.0, 0.6, 1.0])), "beta": 0.4, "n_steps": int(rng.choice([1, 1, 3]))}
    return options


def _sequence_options(name: Name, rng: np.random.Generator) -> dict[str, Any]:
    steps = {
        "length": int(rng.integers(1, 6)),
        "burn_in": int(rng.integers(3)),
        "bootstrap_steps": int(rng.integers(3)),
    }
    latents = {"state": ((2, 3), "float32"), "belief": ((), "float16")}
    of_class: dict[str, Any] = {"online_queue": bool(rng.random() < 0.3)}
    if "Prioritized" in name.buffer:
        of_class = {"alpha": float(rng.choice([0.0, 0.6, 1.0])), "beta": 0.4, "eta": float(rng.choice([0.0, 0.9]))}
    return {
        **steps,
        **of_class,
        "overlap": None if rng.random() < 0.5 else int(rng.integers(sum(steps.values()))),
        "at_episode_end": str(rng.choice(["pad", "stop", "cross"])),
        "latents": {name: latents[name] for name in latents if rng.random() < 0.5},
        "include_next_observations": bool(rng.random() < 0.5),
        "time_first": bool(rng.random() < 0.3),
        "detect_gaps": bool(rng.random() < 0.8),
    }


def _shared_options(name: Name, rng: np.random.Generator) -> dict[str, Any]:
    """Draw the options that SB3's class also has."""
    if name.is_rollout:
        return {"gamma": 0.9, "gae_lambda": 0.8}
    if "NStep" in name.buffer:
        return {"n_steps": int(rng.choice([1, 3, 5])), "gamma": 0.9}
    if "Her" in name.buffer:
        return {
            "n_sampled_goal": int(rng.choice([1, 4])),
            "goal_selection_strategy": str(rng.choice(["future", "final", "episode"])),
            "copy_info_dict": bool(rng.random() < 0.5),
        }
    if "Sequence" in name.buffer:
        return {"handle_timeout_termination": bool(rng.random() < 0.8)}
    if "Prioritized" in name.buffer:
        return {}
    optimize = bool(rng.random() < 0.25)
    return {"optimize_memory_usage": optimize, "handle_timeout_termination": not optimize and rng.random() < 0.8}
