"""Fragments: conditions, values and imports."""

from __future__ import annotations

from importlib.resources import files

import pytest

from weft.interop.eject._compose import Composer, join, prune_imports


def kept(text: str, *flags: str) -> list[str]:
    return list(Composer(flags, ("a", "b"), {})._kept(text.splitlines()))


def test_lines_and_blocks_stay_when_their_words_hold() -> None:
    text = "x\none  #: a\ntwo  #: !a\n#: if a|b\nthree\n#: if b\nfour\n#: else\nfive\n#: end\n#: end"
    assert kept(text, "a") == ["x", "one", "three", "five"]
    assert kept(text, "b") == ["x", "two", "three", "four"]
    assert kept(text) == ["x", "two"]


def test_a_slip_in_a_fragment_is_found() -> None:
    with pytest.raises(AssertionError, match="no flag is called c"):
        kept("one  #: c")
    with pytest.raises(AssertionError, match="has no end"):
        kept("#: if a\none")


def test_imports_that_nothing_uses_are_left_out() -> None:
    imports = (
        "import math\nimport os\n\nfrom torch import Tensor, nn\nfrom torch.distributed.tensor import parallel as tp\n"
    )
    assert prune_imports(imports, "x: Tensor = math.pi") == "import math\n\nfrom torch import Tensor"
    assert prune_imports(imports, "tp.f(nn)") == (
        "from torch import nn\nfrom torch.distributed.tensor import parallel as tp"
    )
    assert (
        join('"""Doc."""', imports, ["\nx = os\n", "", "y = 1\n"]) == '"""Doc."""\n\nimport os\n\nx = os\n\n\ny = 1\n'
    )


def test_every_fragment_is_there() -> None:
    names = {path.name for path in (files("weft.interop.eject") / "templates").iterdir()}
    assert {"main.py.in", "decoder.py.in", "imports.py.in"} <= names
