"""`weft pools init`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from weft.cli._options import FLAG
from weft.errors import LaunchError


def init(
    hosts: Path,
    /,
    *,
    ray: Annotated[bool, FLAG] = False,
    slurm: Annotated[bool, FLAG] = False,
    folder: Path | None = None,
) -> None:
    """Write the files that start Ray or Slurm on machines without a queue, and the pool that --on takes then.

    Each machine is asked over ssh what it is. Nothing is started, and nothing is changed there: read the scripts, then
    give the commands that are printed.

    Parameters
    ----------
    hosts
        Pool file with place = "ssh", which lists the machines; the first one keeps the queue.
    ray
        Write start.sh, stop.sh and pool.toml for Ray.
    slurm
        Write slurm.conf, what goes with it, start.sh, stop.sh and pool.toml for Slurm.
    folder
        Where to write them; by default beside the file, in ray or slurm.
    """
    from weft.config.pool import load_pool
    from weft.run.places.engines import ask_for_engine, refuse_files_that_are_there, write_files
    from weft.run.places.ray_init import RAY_FILES, ray_files
    from weft.run.places.slurm_init import SLURM_FILES, slurm_files

    if ray == slurm:
        given = "both --ray and --slurm were given" if ray else "neither --ray nor --slurm was given"
        raise LaunchError(f"{given}, and one engine is to have the machines. Give one of them.")
    engine = "ray" if ray else "slurm"
    folder = folder if folder is not None else hosts.parent / engine
    pool = load_pool(hosts)
    refuse_files_that_are_there(RAY_FILES if ray else SLURM_FILES, folder)
    asked = ask_for_engine(pool)
    files = ray_files(pool, asked) if ray else slurm_files(pool, asked)
    write_files(files, folder)
    start, written = shlex.quote(str(folder / "start.sh")), shlex.quote(f"{engine}:{folder / 'pool.toml'}")
    print(f"asked     {len(asked)} hosts: {', '.join(each.facts.host for each in asked)}")
    print(f"wrote     {', '.join(files)} in {folder}; nothing was started")
    print(f"first     sh {start}")
    print(f"then      weft train recipe.toml --on {written} --nodes {len(asked)} --run-folder RUN --dry-run")
    if slurm or '"http://127.0.0.1:' in files["pool.toml"]:
        print(f"          given on {asked[0].facts.host}: other machines do not reach the queue")
