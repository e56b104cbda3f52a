"""The arguments of buffer classes.

Each constructor has the positional arguments of SB3's class, in the same order. Our own options are keyword-only, and
only the constructor that uses an option names it. Derived classes pass options on as ``**options``, typed by a
``TypedDict``. :func:`signature_of` makes ``inspect.signature`` show them all.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import Parameter
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt
from typing_extensions import TypedDict

from sb3_extra_buffers.errors import ArgumentError
from sb3_extra_buffers.storage.config import FrameStack, Preference

EpisodeEnd = Literal["pad", "stop", "cross"]
LatentShape = Sequence[int] | tuple[Sequence[int], npt.DTypeLike]


class CommonOptions(TypedDict, total=False):
    """Options of all buffers, explained in :class:`~sb3_extra_buffers.compressed.base.BaseCompressedBuffer`."""

    compression_method: str
    compression_kwargs: Mapping[str, Any] | None
    decompression_kwargs: Mapping[str, Any] | None
    normalize_images: bool
    output_dtype: Literal["raw", "float"]
    frame_stack: FrameStack
    storage: Literal["memory", "mmap"]
    path: str | Path | None
    verify: bool


class StorageOptions(CommonOptions, total=False):
    """Options of buffers in host memory."""

    dtypes: Mapping[str, Any] | npt.DTypeLike | None
    prefer: Preference


class SequenceOptions(StorageOptions, total=False):
    """Options of buffers that sample sequences."""

    length: int
    burn_in: int
    bootstrap_steps: int
    overlap: int | None
    at_episode_end: EpisodeEnd
    latents: Mapping[str, LatentShape] | None
    include_next_observations: bool
    time_first: bool
    online_queue: bool
    detect_gaps: bool


def signature_of(cls: type, root: type) -> inspect.Signature:
    """The signature of ``cls``, with the arguments of its base classes in place of ``**options``.

    :param root: Collect arguments from this class and those derived from it. SB3's classes have no others.
    """
    # Not issubclass(): while a class is being created, abc would cache the wrong answer in its parent.
    constructors = list(_constructors(base for base in cls.__mro__ if root in base.__mro__))
    found: dict[str, Parameter] = {}
    takes_positional = True
    for constructor in constructors:
        parameters = list(inspect.signature(constructor).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind not in _VARIABLE and parameter.name not in found:
                found[parameter.name] = parameter if takes_positional else parameter.replace(kind=_KEYWORD_ONLY)
        kinds = {parameter.kind for parameter in parameters}
        takes_positional &= Parameter.VAR_POSITIONAL in kinds
        if Parameter.VAR_KEYWORD not in kinds:
            break
    try:
        return inspect.Signature(sorted(found.values(), key=lambda parameter: parameter.kind))
    except ValueError:  # a user's class has optional arguments before ours: show its own signature
        return inspect.Signature(list(inspect.signature(constructors[0]).parameters.values())[1:])


def check_options(cls: type, options: Iterable[str]) -> None:
    """Raise an error for an option that no constructor of ``cls`` has."""
    known = {name for constructor in _constructors(cls.__mro__) for name in inspect.signature(constructor).parameters}
    unknown = [name for name in options if name not in known]
    if not unknown:
        return
    own = [name for name in inspect.signature(cls).parameters if name not in _GIVEN_BY_ALGORITHMS]
    similar = difflib.get_close_matches(unknown[0], own, n=1)
    advice = f"Did you mean {similar[0]!r}? " if similar else ""
    if unknown[0] == "n_steps":
        advice = "For n-step returns, use CompressedNStepReplayBuffer or CompressedDictNStepReplayBuffer. "
    raise ArgumentError(
        f"{cls.__name__}() got an unexpected keyword argument {unknown[0]!r}. {advice}Its options are {', '.join(own)}."
    )


def _constructors(classes: Iterable[type]) -> Iterator[Callable[..., None]]:
    return (vars(base)["__init__"] for base in classes if base is not object and "__init__" in vars(base))


_KEYWORD_ONLY = Parameter.KEYWORD_ONLY
_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_GIVEN_BY_ALGORITHMS = ("buffer_size", "observation_space", "action_space", "device", "n_envs")
