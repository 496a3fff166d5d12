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
    """Turn a script or a configuration of another library into Weft's.

    A script for Accelerate, Lightning Fabric, DeepSpeed or plain DDP becomes one of weft.session, printed as a diff;
    what could not be done stands in it as comments "# weft: ...". A configuration of DeepSpeed or Accelerate becomes a
    plan and what a recipe says with it: every key is obeyed, translated with a comment, or refused by its name.

    Parameters
    ----------
    source
        script.py, ds_config.json, or Accelerate's default_config.yaml.
    processes
        How many there are, where the file does not say it.
    fill
        KEY=VALUE of what stands as "auto", such as optimizer.params.lr=1e-4; and batch_size=8, that of a process,
        for Accelerate.
    write
        New file for the changed script, or folder for plan.toml and recipe.part.toml; without it they are printed.
    """
    if source.suffix == ".py":
        if processes is not None or fill:
            option = "--fill" if fill else "--processes"
            raise RecipeError(
                f"{option} is for configurations, and {source} is a script, which asks nothing. Leave it out."
            )
        _migrate_script(source, write)
        return
    from weft.migrate import read_config

    migration = read_config(source, processes=processes, fill=dict(_filled(text) for text in fill or []))
    if write is None:
        print(
            f"# ── plan.toml\n{migration.plan_toml()}\n# ── recipe.toml\n{migration.recipe_toml()}", end="", flush=True
        )
        return
    for name, text in {"plan.toml": migration.plan_toml(), "recipe.part.toml": migration.recipe_toml()}.items():
        _write(write / name, text)


def _migrate_script(source: Path, target: Path | None) -> None:
    import sys

    from weft.migrate import migrate_script

    migrated = migrate_script(source)
    if target is None:
        print(migrated.diff(), end="", flush=True)
    else:
        _write(target, migrated.after)
    for remark in migrated.remarks:
        print(f"to do     {remark}", file=sys.stderr)


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
