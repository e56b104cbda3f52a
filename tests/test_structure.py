"""Layers import only from layers below them, and no module grows too long to read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sb3_extra_buffers

PACKAGE = sb3_extra_buffers.__name__
ROOT = Path(sb3_extra_buffers.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

LAYERS = [
    {"errors", "state", "compiled", "parallel", "interruption", "anonymous_memory"},
    {"codecs"},
    {"storage"},
    {"persistence"},
    {"compressed", "gpu_buffers", "vec_buf", "recording", "compatibility"},
    {"training_utils", "measure", "distributed", "torchrl"},
    {"cli"},
]
"""From the bottom to the top: modules and packages of the same layer may import each other."""

LONGEST_MODULE = 400
GPU_MODULES = 20


def layer_of(part: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if part in layer)


def imported_parts(path: Path) -> Iterator[str]:
    """The packages and top-level modules of this library that a module imports, also for type checkers only."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            names = [f"{PACKAGE}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative imports hide the layer"
            names = [node.module]
        for name in names:
            package, _, rest = name.partition(".")
            if package == PACKAGE and not rest.startswith("__"):
                yield rest.partition(".")[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_module_imports_nothing_from_layers_above(path: Path) -> None:
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if part.startswith("__"):
        pytest.skip("stands for the whole package")
    above = {found for found in imported_parts(path) if layer_of(found) > layer_of(part)}
    assert not above, f"{part} is below {', '.join(sorted(above))}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_module_is_too_long_to_read(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_MODULE


def test_the_gpu_package_stays_small() -> None:
    assert len(list((ROOT / "gpu_buffers").rglob("*.py"))) <= GPU_MODULES
