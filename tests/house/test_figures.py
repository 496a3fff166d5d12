"""Figures for people: no exponents, at no magnitude, and thousands with commas."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable

import pytest

from weft.formatting import format_bytes, format_memory, format_number, format_percent, format_seconds

EXPONENT = re.compile(r"\de[+-]\d")
SPELLERS: tuple[Callable[[float], str], ...] = (
    format_number, format_seconds, format_percent, format_memory, format_bytes,
    lambda value: format_number(value, 2, signed=True),
)  # fmt: skip


def test_no_magnitude_has_an_exponent() -> None:
    draw = random.Random(11)
    for _ in range(2_000):
        value = 10 ** draw.uniform(-9, 15) * draw.choice((1, -1))
        for spell in SPELLERS:
            text = spell(value)
            assert not EXPONENT.search(text), (value, text)
            assert not re.search(r"\d{4}", text.partition(".")[0]), f"no commas in {text}"


def test_figures_have_the_digits_that_were_asked_for() -> None:
    draw = random.Random(12)
    for _ in range(2_000):
        value, digits = 10 ** draw.uniform(-9, 15), draw.randint(1, 5)
        shown = float(format_number(value, digits).replace(",", ""))
        assert math.isclose(shown, value, rel_tol=0.5001 * 10 ** (1 - digits))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_number(0), "0"),
        (format_number(9.996), "10"),
        (format_number(999.7), "1,000"),
        (format_number(0.000424), "0.000424"),
        (format_number(0.5, 2, signed=True), "+0.5"),
        (format_number(math.inf), "inf"),
        (format_seconds(4664.2), "4,664 s"),
        (format_seconds(0.0412), "41.2 ms"),
        (format_seconds(math.inf), "inf s"),
        (format_percent(100.2), "100 %"),
        (format_percent(0.000001), "0.000001 %"),
        (format_memory(80 * 2**30), "80 GiB"),
        (format_memory(37 * 2**20), "37 MiB"),
        (format_bytes(4_700_000), "4.7 MB"),
    ],
)
def test_figures_as_they_read(text: str, expected: str) -> None:
    assert text == expected
