"""Which compression methods there are to test, here and now."""

from __future__ import annotations

from sb3_extra_buffers.codecs.registry import available_methods, parse_method

METHODS = [*available_methods(), "auto"]


def installed(*methods: str) -> list[str]:
    """Those of ``methods`` whose packages are installed."""
    return [method for method in methods if parse_method(method).name in METHODS]
