"""Names, levels, options and missing packages."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sb3_extra_buffers.codecs
from sb3_extra_buffers.codecs import availability
from sb3_extra_buffers.codecs.base import Codec, FrameSpec
from sb3_extra_buffers.codecs.registry import (
    ALIASES,
    METHODS,
    Method,
    available_methods,
    codec_class,
    create_codec,
    option_names,
    parse_method,
)
from sb3_extra_buffers.errors import (
    ConfigurationError,
    LevelError,
    MissingPackageError,
    OptionError,
    UnknownMethodError,
)
from tests.codecs.helpers import usable_methods

FRAME = FrameSpec(16, np.dtype(np.uint8))
CODECS = Path(sb3_extra_buffers.codecs.__file__).parent


@pytest.mark.parametrize(
    ("text", "name", "level"),
    [
        ("auto", "auto", None),
        ("none", "none", None),
        ("rle", "rle", None),
        ("rle-jit", "rle-jit", None),
        ("rle-old", "rle", None),
        ("none1", "none", None),
        ("zstd0", "zstd", 3),
        ("gzip", "gzip", None),
        ("gzip0", "gzip", 0),
        ("gzip/9", "gzip", 9),
        ("igzip3", "igzip", 3),
        ("igzip/3", "igzip", 3),
        ("zstd", "zstd", None),
        ("zstd-5", "zstd", -5),
        ("zstd/-5", "zstd", -5),
        ("zstd5", "zstd", 5),
        ("zstd-100", "zstd", -100),
        ("zstd22", "zstd", 22),
        ("lz4-frame", "lz4-frame", None),
        ("lz4-frame/5", "lz4-frame", 5),
        ("lz4-frame/-5", "lz4-frame", -5),
        ("lz4-block/16", "lz4-block", 16),
        ("lz4-block/0", "lz4-block", 0),
        ("lz4-block/-65536", "lz4-block", -65536),
        ("delta", "delta", None),
        ("zstd-dict", "zstd-dict", None),
    ],
)
def test_methods_are_parsed(text: str, name: str, level: int | None) -> None:
    assert parse_method(text) == Method(name, level)


@pytest.mark.parametrize("name", usable_methods())
def test_what_a_method_prints_is_what_it_was_read_from(name: str) -> None:
    for level in (None, *codec_class(name).levels[:1], *codec_class(name).levels[-1:]):
        method = Method(name, level)
        assert parse_method(str(method)) == method


@pytest.mark.parametrize(
    "text",
    ["", "zip", "zip3", "zstd--5", "zstd-", "zstd/", "zstd 3", "zstd3\n", "zstd/3.5", "lz4-frame5", "lz4", "lz4/3",
     "/3", "auto3", "auto/3", "RLE", "3", "zstd-dict5", "rle-old3", None, 3, b"zstd"],
)  # fmt: skip
def test_unknown_and_malformed_methods(text: object) -> None:
    with pytest.raises(UnknownMethodError) as caught:
        parse_method(text)
    message = str(caught.value)
    assert repr(text) in message
    for name in ("auto", *METHODS, *ALIASES):
        assert name in message


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("gzip10", "0..9"),
        ("gzip-1", "0..9"),
        ("igzip4", "0..3"),
        ("zstd/0", "-100..-1 and 1..22"),
        ("zstd23", "-100..-1 and 1..22"),
        ("zstd-101", "-100..-1 and 1..22"),
        ("lz4-frame/17", "-65536..16"),
        ("lz4-block/17", "-65536..16"),
        ("lz4-block/-65537", "-65536..16"),
        ("rle3", "no levels"),
        ("none/1", "no levels"),
        ("rle-jit/1", "no levels"),
        ("rle-old/1", "no levels"),
    ],
)
def test_levels_out_of_range(text: str, allowed: str) -> None:
    with pytest.raises(LevelError) as caught:
        parse_method(text)
    assert allowed in str(caught.value)


def test_errors_are_value_errors() -> None:
    for text in ("zip", "gzip10"):
        with pytest.raises(ValueError, match="compression method"):
            parse_method(text)


@pytest.mark.parametrize("method", [5, None, b"zstd", ("zstd", 3)])
def test_a_method_that_is_no_string_is_told_to_be_one(method: Any) -> None:
    with pytest.raises(UnknownMethodError, match="is a string, not"):
        create_codec(method, FRAME)


def test_compresslevel_overrides_the_suffix() -> None:
    assert create_codec("gzip3", FRAME, compresslevel=7).label == "gzip7"
    assert create_codec("gzip3", FRAME, compresslevel=None).label == "gzip3"
    assert create_codec("gzip3", FRAME, compresslevel=np.int64(0)).label == "gzip0"
    assert create_codec(Method("gzip", 4), FRAME).label == "gzip4"


@pytest.mark.parametrize(
    ("method", "label"),
    [
        ("gzip", "gzip9"),
        ("igzip", "igzip2"),
        ("zstd", "zstd-3"),
        ("lz4-frame", "lz4-frame/0"),
        ("lz4-block", "lz4-block/0"),
    ],
)
def test_default_levels(method: str, label: str) -> None:
    if method not in available_methods():
        pytest.skip("not installed")
    assert create_codec(method, FRAME).label == label


@pytest.mark.parametrize("level", [10, "3", 3.0, object])
def test_compresslevel_is_checked(level: object) -> None:
    with pytest.raises(LevelError, match=r"0\.\.9"):
        create_codec("gzip", FRAME, compresslevel=level)


def test_unknown_options_are_named() -> None:
    with pytest.raises(OptionError, match=r"'gzip'.*'compres_level'.*compresslevel"):
        create_codec("gzip", FRAME, compres_level=3)
    with pytest.raises(OptionError, match=r"'none'.*'compresslevel'.*indexed_colour"):
        create_codec("none", FRAME, compresslevel=3)


def test_options_of_the_caller_stay_as_they_are() -> None:
    options = {"compresslevel": 3}
    create_codec("gzip", FRAME, **options)
    assert options == {"compresslevel": 3}


def test_block_size_of_lz4_frame() -> None:
    if "lz4-frame" not in available_methods():
        pytest.skip("not installed")
    create_codec("lz4-frame", FRAME, block_size=5)
    with pytest.raises(ConfigurationError, match="block_size"):
        create_codec("lz4-frame", FRAME, block_size=3)


@pytest.mark.parametrize("method", ["delta", "bitpack", "pixel-lz", "delta-zstd", "zstd-dict"])
@pytest.mark.parametrize("number", [0, -1, 1025, 8.0, "8", [8], float("nan")])
def test_frames_per_record_is_an_integer_in_a_range(method: str, number: object) -> None:
    if method not in available_methods():
        pytest.skip("not installed")
    with pytest.raises(ConfigurationError, match=r"frames_per_record must be an integer from 1 to \d+, not"):
        create_codec(method, FRAME, frames_per_record=number)


def test_auto_is_not_a_codec() -> None:
    with pytest.raises(ConfigurationError, match="auto"):
        create_codec("auto", FRAME)


def test_nothing_is_left_unregistered() -> None:
    registered = {(entry.module, entry.class_name) for entry in METHODS.values()}
    named = set()
    for path in CODECS.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            # A concrete codec is a class that gives itself a name.
            if isinstance(node, ast.ClassDef) and any(
                isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", None) == "name"
                for statement in node.body
            ):
                named.add((path.stem, node.name))
    # What ``delta`` was in earlier files is no method of its own.
    assert named - {("delta_words", "DeltaWordsCodec")} <= registered


@pytest.mark.parametrize("name", usable_methods())
def test_registered_classes_know_their_names(name: str) -> None:
    codec = codec_class(name)
    assert issubclass(codec, Codec)
    assert codec.name == name
    assert ("compresslevel" in option_names(name)) == bool(codec.levels)


@pytest.mark.parametrize("name", [name for name, entry in METHODS.items() if entry.package])
def test_missing_packages_name_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = METHODS[name]
    monkeypatch.setitem(sys.modules, entry.package, None)
    assert name not in available_methods()
    with pytest.raises(
        MissingPackageError, match=rf"'{name}'.*{entry.package}.*sb3-extra-buffers\[{entry.extra}\]"
    ) as caught:
        create_codec(name, FRAME)
    assert isinstance(caught.value, ImportError)
    assert (caught.value.package, caught.value.extra) == (entry.package, entry.extra)


@pytest.mark.parametrize("name", ["rle-jit", "igzip", "zstd", "lz4-frame", "lz4-block"])
def test_codecs_themselves_name_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do when they are not created by the registry."""
    entry = METHODS[name]
    for module in [module for module in sys.modules if module.partition(".")[0] == entry.package]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, entry.package, None)
    with pytest.raises(MissingPackageError, match=f"'{name}'"):
        codec_class(name)(FRAME)


def test_broken_packages_are_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_installed.py").write_text("import a_dependency_that_does_not_exist\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_dependency_that_does_not_exist") as caught:
        availability.require("half_installed", "A test", "test")
    assert not isinstance(caught.value, MissingPackageError)


@pytest.mark.parametrize(
    ("check", "package"),
    [("has_numba", "numba"), ("has_igzip", "isal"), ("has_zstd", "zstandard"), ("has_lz4", "lz4")],
)
def test_availability(check: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_package = getattr(availability, check)
    assert has_package() == availability.is_installed(package)
    monkeypatch.setitem(sys.modules, package, None)
    assert has_package() is False


def test_names_and_levels_need_no_optional_package() -> None:
    """Neither the registry nor any codec module imports what might be missing."""
    program = (
        "import sys\n"
        "from sb3_extra_buffers.codecs.registry import available_methods, parse_method\n"
        "available_methods()\n"
        "for text in ('rle-jit', 'igzip3', 'zstd-5', 'lz4-frame/5', 'lz4-block/5'): parse_method(text)\n"
        "print(*sorted({'numba', 'isal', 'zstandard', 'lz4', 'torch'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
