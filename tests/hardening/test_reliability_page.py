"""The page of promises names tests that exist and campaigns that run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hardening.campaign import CAMPAIGNS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("## Promises\n")[2].partition("\n## ")[0].splitlines()
    if line.startswith("|") and not re.fullmatch(r"[|\- ]+", line)
][1:]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_each_promise_names_a_test_and_a_campaign_that_are_there(row: list[str]) -> None:
    _, tests, campaign = row
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
    assert named, f"no test in {tests!r}"
    for path, name in named:
        assert re.search(rf"^ *(async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), name
    match = re.match(r"`(\w+)`", campaign)
    assert match, f"no campaign in {campaign!r}"
    assert match[1] in CAMPAIGNS
