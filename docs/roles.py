"""Turns the roles of Sphinx in docstrings, such as ``:class:`~package.Name```, into plain code: ``Name``."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(~?)\.*([\w.]+)`")


class Roles(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(_as_code, obj.docstring.value)


def _as_code(role: re.Match[str]) -> str:
    shortened, path = role.groups()
    return f"`{path.rpartition('.')[2] if shortened else path}`"
