"""What the peer's classes have, Weft's have, too, or the guide's table says why not."""

from __future__ import annotations

import pytest
from pool import RankPool
from surface import ARGUMENTS, GUIDE, OTHERWISE, arguments_of, names_of, written

import accelerate as peer
import weft.accelerate
from weft.accelerate import Accelerator
from weft.accelerate.unsupported import METHODS
from weft.errors import RecipeError


def attributes() -> list[str]:
    made = Accelerator()
    own = [*vars(made)]
    made.end_training()
    return own


def test_an_accelerator_has_what_the_peer_has(ranks: RankPool) -> None:
    own = {*names_of(Accelerator), *ranks.run(1, attributes)[0]}
    assert set(names_of(peer.Accelerator)) - own == METHODS.keys()
    assert OTHERWISE.keys() <= own
    assert not METHODS.keys() & own


def test_methods_take_the_peers_arguments() -> None:
    missing: dict[str, set[str]] = {}
    for name in sorted(set(names_of(peer.Accelerator)) & set(names_of(Accelerator))):
        asked, taken = arguments_of(peer.Accelerator, name), arguments_of(Accelerator, name)
        if asked is not None and taken is not None and asked - taken:
            missing[name] = asked - taken
    assert not missing
    assert arguments_of(peer.Accelerator, "__init__") <= arguments_of(Accelerator, "__init__")  # type: ignore[operator]


def test_the_guides_table_is_what_there_is() -> None:
    text = GUIDE.read_text()
    assert text == written(text), "write it anew: python tests/accelerate/surface.py"
    assert all(f"`{name}`" in text for name in ARGUMENTS)


def test_what_is_not_had_says_so_when_it_is_used() -> None:
    from weft.accelerate import init_empty_weights
    from weft.accelerate.utils import MegatronLMPlugin

    assert not isinstance(3, MegatronLMPlugin)
    with pytest.raises(RecipeError, match="init_empty_weights is not had in weft.accelerate. Construct the model"):
        init_empty_weights()
    with pytest.raises(RecipeError, match="MegatronLMPlugin is not had"):
        MegatronLMPlugin.something  # noqa: B018
    with pytest.raises(AttributeError):
        weft.accelerate.nothing_of_the_kind  # noqa: B018
