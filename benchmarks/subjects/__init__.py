"""The libraries that are compared, each behind one small adapter.

A subject is named ``library:method``, such as ``ours:zstd-5``, or by its library alone if it has only one method.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from benchmarks.subjects.base import Subject, Task

__all__ = ["LIBRARIES", "Library", "Subject", "Task", "library_of", "make_subject", "method_of"]


@dataclass(frozen=True)
class Library:
    title: str
    adapter: str
    """``module:class``, imported in the process that measures it."""
    peers: str | None = None
    """The virtual environment it needs, a file in ``benchmarks/requirements``; ``None`` for that of the caller."""
    has_rollouts: bool = False

    def load(self) -> type[Subject]:
        module, _, name = self.adapter.partition(":")
        cls: type[Subject] = getattr(importlib.import_module(f"benchmarks.subjects.{module}"), name)
        return cls


LIBRARIES = {
    "sb3": Library("SB3", "sb3:Sb3", has_rollouts=True),
    "ours": Library("this library", "ours:Ours", has_rollouts=True),
    "older": Library("sb3-extra-buffers 0.5.0", "older:Older", peers="older", has_rollouts=True),
    "cpprb": Library("cpprb", "cpprb:Cpprb", peers="others"),
    "torchrl": Library("TorchRL", "torchrl:Torchrl", peers="others"),
}


def library_of(subject: str) -> Library:
    name = subject.partition(":")[0]
    if name not in LIBRARIES:
        raise ValueError(f"unknown library {name!r} in {subject!r}; known are {', '.join(LIBRARIES)}")
    return LIBRARIES[name]


def method_of(subject: str) -> str:
    return subject.partition(":")[2]


def make_subject(subject: str, task: Task) -> Subject:
    return library_of(subject).load()(method_of(subject), task)
