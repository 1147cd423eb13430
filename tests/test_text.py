"""printable: text of others holds nothing that a terminal or a log obeys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.text import printable


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain \u00fcnicode, 'quoted' \\ too", "plain \u00fcnicode, 'quoted' \\ too"),
        ("\x1b[2J\x1b]0;title\x07\r\n", r"\x1b[2J\x1b]0;title\x07\r\n"),
        ("\u202egnirts\u2028\u2029\ufeff", r"\u202egnirts\u2028\u2029\ufeff"),
        (ValueError("a\nb"), r"a\nb"),
    ],
)
def test_text_of_a_stranger_is_made_printable(value: object, text: str) -> None:
    assert printable(value) == text


@given(st.text())
def test_any_text_becomes_one_short_line(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert shown == text or not text.isprintable()
    assert len(printable(text * 1000, 20)) <= 10 * 20
