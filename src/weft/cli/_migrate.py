"""`weft migrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from weft.errors import RecipeError


def migrate(
    source: Path,
    /,
    *,
    processes: int | None = None,
    fill: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    write: Path | None = None,
) -> None:
    """Turn a configuration of DeepSpeed or Accelerate into Weft's.

    It becomes a plan and what a recipe says with it: every key is obeyed, translated with a comment, or refused by its
    name. Scripts need no rewriting: `from weft.accelerate import Accelerator` and `from weft.fabric import Fabric`
    stand in place of their imports.

    Parameters
    ----------
    source
        ds_config.json, or Accelerate's default_config.yaml.
    processes
        How many there are, where the file does not say it.
    fill
        KEY=VALUE of what stands as "auto", such as optimizer.params.lr=1e-4; and batch_size=8, that of a process,
        for Accelerate.
    write
        New folder for plan.toml and recipe.part.toml; without it they are printed.
    """
    if source.suffix == ".py":
        raise RecipeError(
            f"{source} is a script, which is not rewritten: write `from weft.accelerate import Accelerator` in place of"
            " `from accelerate import Accelerator`, or `from weft.fabric import Fabric` in place of Lightning's, and it"
            " runs. A plain loop has a guide: docs/guides/coming-from.md."
        )
    from weft.interop.migrate import read_config

    migration = read_config(source, processes=processes, fill=dict(_filled(text) for text in fill or []))
    if write is None:
        print(
            f"# ── plan.toml\n{migration.plan_toml()}\n# ── recipe.toml\n{migration.recipe_toml()}", end="", flush=True
        )
        return
    for name, text in {"plan.toml": migration.plan_toml(), "recipe.part.toml": migration.recipe_toml()}.items():
        _write(write / name, text)


def _write(path: Path, text: str) -> None:
    if path.exists():
        raise RecipeError(f"{path} is there already. Give another name, or move it away.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{path} cannot be written: {error.strerror or error}.") from None
    print(f"written to {path}")


def _filled(text: str) -> tuple[str, Any]:
    import json

    key, equals, value = text.partition("=")
    if not equals or not key:
        raise RecipeError(f"--fill {text} is no KEY=VALUE. Write, for example, --fill optimizer.params.lr=1e-4.")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
