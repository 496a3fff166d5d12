"""The folder of one run: everything a run leaves behind lies in it, and nothing lies outside."""

from __future__ import annotations

import datetime
import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path

from weft.errors import LaunchError
from weft.events._owner import OWNER, FolderOwner, read_owner

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`runs/<name>-<date>-<n>/`, readable by its owner only.  Make it on one rank and give the path to the others."""

    path: Path

    @classmethod
    def create(cls, root: Path, name: str, *, date: datetime.date | None = None) -> RunFolder:
        """Make a new folder; two runs that start at once get two folders.  Call on one rank.

        Raises:
            LaunchError: the name is none for a folder, or `root` is not writable.
        """
        if not _NAME.fullmatch(name):
            raise LaunchError(
                f"run name {name!r} is no folder name. Use letters, digits, dots, dashes and underscores."
            )
        stem = f"{name}-{(date or datetime.date.today()).isoformat()}"
        try:
            root.mkdir(parents=True, exist_ok=True)
            for number in itertools.count(1):
                path = root / f"{stem}-{number}"
                try:
                    path.mkdir(mode=0o700)
                except FileExistsError:
                    continue
                return cls(path)
        except OSError as error:
            raise LaunchError(
                f"the run folder {root / stem}-1 cannot be made: {error.strerror}. Give a folder that is writable."
            ) from None
        raise AssertionError("unreachable: the count has no end")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open the folder of an earlier run.

        Raises:
            LaunchError: it does not exist.
        """
        if not path.is_dir():
            why = "it is a file. Give the folder that it lies in" if path.is_file() else "it does not exist"
            raise LaunchError(f"{path} is no folder of a run: {why}.")
        return cls(path)

    @property
    def owner(self) -> FolderOwner | None:
        """The process that writes here, or did last, as its file says; None where none is known."""
        return read_owner(self.path / OWNER)

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def store_url(self, checkpoints: str) -> str:
        """Return the URL below which the saves of this run lie in an object store, such as `s3://bucket/prefix`."""
        return f"{checkpoints.rstrip('/')}/{self.path.name}"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def profiles(self) -> Path:
        return self.path / "profiles"

    @property
    def profile_request(self) -> Path:
        return self.profiles / "request.json"

    @property
    def launcher_log(self) -> Path:
        return self.path / "launcher.log"

    def how_to_go_on(self) -> str:
        """A sentence on what is saved and how to go on from it; empty where no save has finished."""
        try:
            newest = (self.checkpoints / "latest").read_text().strip()
        except OSError:
            return ""
        path = os.path.relpath(self.path)
        if self.recipe.is_file():
            command = f"weft train {path}/recipe.toml --plan {path}/plan.toml --resume {path}"
            return f"{newest} is saved. Go on with: {command}"
        return f"{newest} is saved. Go on with weft.session(folder={path!r}) and state.load() before the first step."

    def log(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.log"
