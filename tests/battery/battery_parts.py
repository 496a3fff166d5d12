"""What a drawn program is made of: parts, each a few lines of a user's code, and what is strange in it.

`parts/*.txt` has them: `== name|flags`, and `-- field` with its lines.  `init` and `body` are of a module that maps
`x`, rows × `W`, to as much.  `loss` works on `per` (a loss for each sample) and `extra`; it may read `logits`,
`hidden`, `x`, `y` and `batch`.  `after` is what the loop does after a step, with `run` and `step`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Part:
    """One strange thing."""

    name: str
    kind: str
    """The file that it is read from."""
    define: str = ""
    """Lines of the program's module."""
    init: str = ""
    body: str = ""
    loss: str = ""
    outputs: str = ""
    """What the model returns in place of `logits`; `hidden` are the features before the head, `given` its input."""
    unpack: str = ""
    """`logits, hidden` in `outputs`, where they are no pair."""
    mixin: str = ""
    """A further base of the model's class."""
    before: str = ""
    """What the loop does before `prepare`."""
    after: str = ""
    after_build: str = ""
    """What `build` does with the finished model."""
    optimizer: str = ""
    """Expression in `groups`, `parameters` and `model`."""
    scheduler: str = ""
    """Expression in `optimizer`."""
    dtype: str = ""
    tolerance: float = 0.0
    """Of weights and losses, where it is not that of the dtype."""
    draws: bool = False
    """Draws random numbers: plain PyTorch draws others."""
    resumes: bool = True
    """A state dict of the model and one of the optimizer hold all there is."""
    batch: str = ""
    """Form of batches."""
    skeleton: str = ""
    """The only skeleton in which it stands."""


def read_parts() -> tuple[Part, ...]:
    """All parts, by file and in its order."""
    files = sorted(Path(__file__).with_name("parts").glob("*.txt"))
    return tuple(_part(section, file.stem) for file in files for section in f"\n{file.read_text()}".split("\n== ")[1:])


def _part(section: str, kind: str) -> Part:
    title, _, rest = section.partition("\n")
    name, _, flags = title.partition("|")
    given: dict[str, object] = {}
    for flag in filter(None, flags.split(",")):
        key, _, value = flag.partition("=")
        given[key] = {"no": False, "": True}.get(value, value)
    if "tolerance" in given:
        given["tolerance"] = float(str(given["tolerance"]))
    for piece in f"\n{rest}".split("\n-- ")[1:]:
        field, _, lines = piece.partition("\n")
        given[field] = lines.strip("\n")
    return Part(name=name, kind=kind.replace("_", " "), **given)  # type: ignore[arg-type]
