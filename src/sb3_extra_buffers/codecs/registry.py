"""The names of the compression methods, and the only parser of names such as ``"zstd-5"``.

A new codec is a line in ``METHODS``. Its module is imported on first use. It may need optional packages to create an
instance, but not to be imported.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sb3_extra_buffers.codecs import availability
from sb3_extra_buffers.codecs.base import Codec, FrameSpec
from sb3_extra_buffers.codecs.indexed_colour import IndexedColourCodec
from sb3_extra_buffers.codecs.method import Method as Method
from sb3_extra_buffers.errors import (
    ConfigurationError,
    LevelError,
    MissingPackageError,
    OptionError,
    UnknownMethodError,
)

AUTO = "auto"
"""Observations decide which method this becomes, so no codec of this name can be created."""


@dataclass(frozen=True)
class Entry:
    """The module and class of a codec, and the optional package that it needs."""

    module: str
    class_name: str
    package: str | None = None
    extra: str | None = None


METHODS: dict[str, Entry] = {
    "none": Entry("none", "NoneCodec"),
    "rle": Entry("rle", "RleCodec"),
    "rle-jit": Entry("rle_jit", "RleJitCodec", "numba", "numba"),
    "gzip": Entry("gzip", "GzipCodec"),
    "igzip": Entry("igzip", "IgzipCodec", "isal", "isal"),
    "zstd": Entry("zstd", "ZstdCodec", "zstandard", "zstd"),
    "lz4-frame": Entry("lz4_frame", "Lz4FrameCodec", "lz4", "lz4"),
    "lz4-block": Entry("lz4_block", "Lz4BlockCodec", "lz4", "lz4"),
    "delta": Entry("delta", "DeltaCodec"),
    "bitpack": Entry("bitpack", "BitpackCodec"),
    "pixel-lz": Entry("pixel_lz", "PixelLzCodec"),
    "delta-zstd": Entry("delta_zstd", "DeltaZstdCodec", "zstandard", "zstd"),
    "zstd-dict": Entry("zstd_dict", "ZstdDictCodec", "zstandard", "zstd"),
}
ALIASES = {"rle-old": "rle"}
_OLD_SHORTHANDS = {"none1": "none", "zstd0": "zstd/3"}
"""Levels that version 0.5 accepted: ``none`` ignored its level, and 0 was zstd's default."""

_SHORTHAND = re.compile(r"((?:[A-Za-z]+)|(?:[\w\-]+/))(\-?[0-9]+)")


def parse_method(text: str) -> Method:
    """Read a method as users write it: ``"rle"``, ``"igzip3"``, ``"zstd-5"`` (level -5), ``"lz4-frame/5"``.

    Its level is checked, but not whether the packages that it needs are installed.
    """
    if not isinstance(text, str):
        raise UnknownMethodError(f"A compression method is a string, not {text!r}. {_valid_methods()}")
    text = _OLD_SHORTHANDS.get(text, text)
    name, level = text, None
    if name not in METHODS and name not in ALIASES and name != AUTO:
        match = _SHORTHAND.fullmatch(text)
        if match is None:
            raise UnknownMethodError(f"Unknown compression method {text!r}. {_valid_methods()}")
        name, level = match[1].removesuffix("/"), int(match[2])
    name = ALIASES.get(name, name)
    if name == AUTO and level is None:
        return Method(AUTO)
    if name not in METHODS:
        raise UnknownMethodError(f"Unknown compression method {name!r} in {text!r}. {_valid_methods()}")
    if level is not None:
        _check_level(name, level)
    return Method(name, level)


def create_codec(method: str | Method, frame: FrameSpec, **options: Any) -> Codec:
    """Create the codec for ``method`` and frames of the format ``frame``.

    The option ``compresslevel`` overrides the level in the method's name. ``indexed_colour=True`` adds a palette. The
    other options are the codec's own.
    """
    parsed = parse_method(str(method) if isinstance(method, Method) else method)
    if parsed.name == AUTO:
        raise ConfigurationError("The method 'auto' needs observations to choose by; name a method to create a codec.")
    known = (*option_names(parsed.name), "indexed_colour")
    for option in options:
        if option not in known:
            has = f"Its options are: {', '.join(known)}."
            raise OptionError(f"The compression method {parsed.name!r} has no option {option!r}. {has}")
    level = options.pop("compresslevel", None)
    if level is None:
        level = parsed.level
    if level is not None:
        options["compresslevel"] = _check_level(parsed.name, level)
    entry = METHODS[parsed.name]
    if entry.package is not None and entry.extra is not None and not availability.is_installed(entry.package):
        raise MissingPackageError(f"The compression method {parsed.name!r}", entry.package, entry.extra)
    if options.pop("indexed_colour", False):
        return IndexedColourCodec(frame, lambda inner: codec_class(parsed.name)(inner, **options))
    return codec_class(parsed.name)(frame, **options)


def available_methods() -> tuple[str, ...]:
    """The methods whose packages are installed."""
    return tuple(
        name for name, entry in METHODS.items() if entry.package is None or availability.is_installed(entry.package)
    )


def codec_class(name: str) -> type[Codec]:
    """The class of a method of ``METHODS``."""
    entry = METHODS[name]
    module = importlib.import_module(f"sb3_extra_buffers.codecs.{entry.module}")
    codec: type[Codec] = getattr(module, entry.class_name)
    return codec


def option_names(name: str) -> tuple[str, ...]:
    """The options that the codec of a method takes, read from its constructor."""
    parameters = inspect.signature(codec_class(name)).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


def _check_level(name: str, level: Any) -> int:
    levels = codec_class(name).levels
    if not levels:
        raise LevelError(f"The compression method {name!r} has no levels, but {level!r} was given. Leave it out.")
    try:
        number = operator.index(level)
    except TypeError:
        number = None
    if number is None or number not in levels:
        ranges = level_ranges(levels)
        raise LevelError(f"The compression method {name!r} has no level {level!r}. Its levels are {ranges}.")
    return number


def _valid_methods() -> str:
    names = ", ".join([AUTO, *METHODS, *ALIASES])
    return f"The methods are {names}; a level is written like 'igzip3', 'zstd-5' (level -5) or 'lz4-frame/5'."


def level_ranges(levels: Iterable[int]) -> str:
    """Describe levels by ranges, such as ``-100..-1 and 1..22``."""
    numbers = sorted(levels)
    gaps = [(low, high) for low, high in itertools.pairwise(numbers) if high - low > 1]
    ends = [numbers[0], *itertools.chain.from_iterable(gaps), numbers[-1]]
    return " and ".join(f"{first}..{last}" for first, last in zip(ends[::2], ends[1::2], strict=True))
