"""Lists the decisions in ``docs/adr`` in the navigation, each with the title that it gives itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> None:
    docs = Path(config.docs_dir)
    decisions = [path.relative_to(docs).as_posix() for path in sorted((docs / "adr").glob("*.md"))]
    for section in config.nav:
        for pages in section.values():
            for page in pages if isinstance(pages, list) else ():
                if "Decisions" in page:
                    page["Decisions"] = decisions
