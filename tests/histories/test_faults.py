"""The planted faults still match the code. Searching for them takes minutes: see ``planted_faults``."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.histories.faults import FAULTS, Fault
from tests.histories.planted_faults import BEGIN, END, PACKAGE, ROOT, Finding, publish
from tests.histories.short import BUFFERS


def test_there_are_many_of_all_kinds() -> None:
    assert len(FAULTS) >= 24
    assert max(Counter(fault.name for fault in FAULTS).values()) == 1
    assert {fault.file.split("/")[0] for fault in FAULTS} >= {"codecs", "compressed", "storage"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fits_one_place_and_leaves_valid_code(fault: Fault) -> None:
    ast.parse(fault.plant((ROOT / PACKAGE / fault.file).read_text(encoding="utf-8")))
    assert set(fault.buffers) <= set(BUFFERS)


def test_one_that_does_not_fit_is_an_error() -> None:
    fault = FAULTS[0]
    for text in ("", fault.old * 2):
        with pytest.raises(ValueError, match="instead of one"):
            fault.plant(text)


def test_the_table_replaces_the_one_before(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"Before\n{BEGIN}\nold\n{END}\nAfter\n")
    publish(page, [Finding(FAULTS[0], "a history", "AssertionError", 1.0), Finding(FAULTS[1], None, "", 2.0)])
    text = page.read_text()
    assert text.startswith("Before\n")
    assert text.endswith("After\n")
    assert "1 of 2 are found" in text
    assert "**nothing**" in text
    assert "old\n" not in text
