"""What callers need beside tokenyard is what the page about coming from DeepEP says."""

from __future__ import annotations

import re
from pathlib import Path

from tests.cases.callers.settings import SETTINGS

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "from_deepep.md"


def test_the_page_shows_all_settings_and_no_other() -> None:
    table = PAGE.read_text().split("What a program must set outside of tokenyard")[1]
    rows = [line.split(" | ") for line in table.split("\n\n")[1].splitlines()[2:]]
    shown = {re.findall("`(.*?)`", row[1])[0] for row in rows}
    given = {"MoELayer(..., pg_collection=ProcessGroupCollection(...))"}  # where a layer is made
    assert shown == given | {one.line for settings in SETTINGS.values() for one in settings}
