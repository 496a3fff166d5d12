"""A script of another library as one of a session: the changed text, and as a diff."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from weft.errors import RecipeError
from weft.migrate.script._local_sgd import without_local_sgd
from weft.migrate.script._source import Source
from weft.migrate.script._step import translate_loops
from weft.migrate.script._words import look, translate_words
from weft.migrate.script._wrap import begin_session, mend_imports, open_session


@dataclass(frozen=True, slots=True, kw_only=True)
class MigratedScript:
    """A script before and after."""

    name: str
    before: str
    after: str

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is left to do, or to know: the comments `# weft: …` of the changed script, in their order."""
        lines = re.findall(r"^\s*# weft: (.*)$", self.after, re.M)
        return tuple(lines)

    def diff(self) -> str:
        """Return the change as a unified diff."""
        lines = difflib.unified_diff(
            self.before.splitlines(keepends=True),
            self.after.splitlines(keepends=True),
            fromfile=self.name,
            tofile=f"{self.name} (weft)",
        )
        return "".join(lines)


def migrate_script(path: str | Path) -> MigratedScript:
    """Rewrite a script for Accelerate, Lightning Fabric, DeepSpeed or plain DDP as one of `weft.session`.

    Nothing of it is run or imported.  What is not changed keeps its comments and its form; what could not be done
    stands as a comment `# weft: …` at its line.

    Raises:
        RecipeError: the file cannot be read, is not Python, or uses none of these libraries.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path} is not text in UTF-8.") from None
    return MigratedScript(name=path.name, before=text, after=_migrated(text, path.name))


def _migrated(text: str, name: str) -> str:
    source, local_steps = without_local_sgd(Source(text, name), name)
    script = look(source)
    script.options.update({"local_steps": local_steps} if local_steps else {})
    if not script.created and not script.setups and not script.is_distributed:
        raise RecipeError(
            f"{name} makes no Accelerator, no Fabric, no DeepSpeed engine and no DistributedDataParallel, so that"
            " nothing is to be changed. For a plain loop see the tutorial's part on sessions."
        )
    translate_words(script)
    translate_loops(script)
    begin_session(script)
    changed = script.source.result()
    return mend_imports(open_session(changed, name), name)
