"""Find out which optional packages are installed, without importing them."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

from sb3_extra_buffers.compiled import has_numba as has_numba
from sb3_extra_buffers.errors import MissingPackageError


def is_installed(package: str) -> bool:
    """Whether ``package`` could be imported."""
    return find_spec(package) is not None


def has_igzip() -> bool:
    """Whether isal is installed, which ``igzip`` needs."""
    return is_installed("isal")


def has_zstd() -> bool:
    """Whether zstandard is installed, which ``zstd``, ``delta-zstd`` and ``zstd-dict`` need."""
    return is_installed("zstandard")


def has_lz4() -> bool:
    """Whether lz4 is installed, which ``lz4-frame`` and ``lz4-block`` need."""
    return is_installed("lz4")


def require(module: str, what: str, extra: str = "") -> ModuleType:
    """Import ``module``, which ``what`` needs, or raise an error that names the extra or package to install."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # An installed package that lacks one of its own dependencies is another problem: do not hide it.
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise MissingPackageError(what, package, extra) from error
