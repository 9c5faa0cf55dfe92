"""Generated text goes between two marks of a page."""

import re

import pytest

from benchmarks.pages import replace_between_marks

PAGE = "before <!-- figures: begin -->{}<!-- figures: end --> after <!-- plans: begin -->"


def test_text_is_written_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.format("of yesterday"))
    replace_between_marks(page, "figures", "| new |\n")
    assert page.read_text() == PAGE.format("\n\n| new |\n\n")


@pytest.mark.parametrize("name", ["tables", "plans"])
def test_missing_marks(name, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(""))
    message = f"{page} must have the marks <!-- {name}: begin --> and <!-- {name}: end -->"
    with pytest.raises(ValueError, match=rf"\A{re.escape(message)}\Z"):
        replace_between_marks(page, name, "new")
    assert page.read_text() == PAGE.format("")
