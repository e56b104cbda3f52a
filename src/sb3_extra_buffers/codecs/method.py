"""A compression method and its level, as one value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """What a user means by ``"zstd-5"``: the method ``zstd`` at level -5. Without a level, the method's own default."""

    name: str
    level: int | None = None

    def __str__(self) -> str:
        if self.level is None:
            return self.name
        return f"{self.name}{self.level}" if self.name.isalpha() else f"{self.name}/{self.level}"
