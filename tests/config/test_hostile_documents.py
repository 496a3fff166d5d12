"""Plans and clusters that somebody wrote to do harm, or by mistake: an error of their noun, soon, no traceback."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.config.cluster import dump_cluster, parse_cluster, resolve_cluster
from weft.config.plan import Plan, dump_plan, load_plan, parse_plan
from weft.errors import ClusterError, PlanError, WeftError

VALUES = (
    *("1e300", "-1e300", "nan", "-nan", "inf", "-inf", "0", "-1", "true", '""', '"x"', "[]", "{}", "1.5", "1979-05-27"),
    *("9" * 30, "-" + "9" * 30, "9" * 5000, "1e999", "[" * 50 + "]" * 50, "[[1]]", '["a"]', "{a = 1}", "1000000000"),
    *("0x7fffffffffffffff", '"\\u0000"', '"../../etc/passwd"', '"\\ud800"', "07:32:00", "0b1", "1_000", "[1, 'a']"),
)


def changed(text: str, draw: random.Random) -> str:
    lines = text.splitlines()
    for _ in range(draw.choice((1, 1, 1, 3))):
        at = draw.randrange(len(lines))
        how = draw.randrange(8)
        key = lines[at].partition("=")[0] if "=" in lines[at] else "x "
        if how < 5:
            lines[at] = f"{key}= {draw.choice(VALUES)}"
        elif how == 5:
            lines.insert(at, lines[draw.randrange(len(lines))])
        elif how == 6:
            lines[at] = lines[at][: draw.randrange(len(lines[at]) + 1)]
        else:
            lines.insert(at, draw.choice(("[mesh", "\x00", "a.b.c = 1", "[[mesh]]", "[a.b]", "= 3", '"', "x = [" * 3)))
    return "\n".join(lines)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("noun", ["plan", "cluster"])
def test_drawn_documents_are_read_or_refused(noun: str, seed: int) -> None:
    draw = random.Random(seed)
    whole = dump_plan(Plan(), everything=True) if noun == "plan" else dump_cluster(resolve_cluster("4x8xh100"))
    parse: Callable[[str], Any] = parse_plan if noun == "plan" else parse_cluster
    error = PlanError if noun == "plan" else ClusterError
    refused = 0
    for _ in range(150):
        text, started = changed(whole, draw), time.monotonic()
        try:
            parse(text)
        except error as problem:
            assert str(problem).startswith(noun), problem  # noqa: PT017 - reading is right, too
            assert len(str(problem)) < 1500, problem  # noqa: PT017
            refused += 1
        except Exception as problem:
            raise AssertionError(text) from problem
        assert time.monotonic() - started < 5, text
    assert refused > 50


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 100_000,
        "a = " + "{a=" * 100_000,
        ".".join("a" * 200_000) + " = 1",
        "x = " + "9" * 100_000,
        "".join(f"k{number} = 1\n" for number in range(60_000)),
        "[mesh]\ntensor = " + "9" * 400,
        "a" * 1_000_000,
        "#" * (5 << 20),
    ],
    ids=["brackets", "braces", "dots", "digits", "lines", "huge", "word", "size"],
)
def test_what_is_there_to_exhaust_a_reader_is_refused_soon(text: str) -> None:
    for parse, error in ((parse_plan, PlanError), (parse_cluster, ClusterError)):
        started = time.monotonic()
        with pytest.raises(error):
            parse(text)
        assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    "spec", ["9" * 5000 + "x8xh100", "999999999999x999999999xh100", "0x0xh100", "-1x8xh100", "x" * 9999]
)
def test_absurd_names_of_clusters(spec: str) -> None:
    started = time.monotonic()
    try:
        resolve_cluster(spec)
    except WeftError as problem:
        assert len(str(problem)) < 20_000  # noqa: PT017 - both are right
    assert time.monotonic() - started < 5


def test_devices_are_not_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no plain file"):
        load_plan("/dev/zero")
