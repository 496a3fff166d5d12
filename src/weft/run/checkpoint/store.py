"""Checkpoints in an object store: S3, and whatever else `fsspec` reaches.

    s3://bucket/prefix/<run>/
        step-000120/
            rank-00000-0000.safetensors …   the files of a checkpoint's folder
            rank-00000.json …
            manifest.json                   put last: a save without one has not happened
            pinned                          empty: no save removes this one
        step-000120.<token>/                the same step, saved again

An object store has no rename, so nothing is put over what lies there: a step that is saved again goes under another
name, and the older one is removed afterwards.  What is read is brought into a folder of this host first, checked digest
by digest, and read from there: each byte leaves the store once for each host.

Runs in the supervisor's process and under `weft checkpoint`, never on a rank.
"""

from __future__ import annotations

import datetime
import logging
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import xxhash

from weft.errors import CheckpointError, WeftError
from weft.events import Owned
from weft.run.checkpoint._commit import create_partial, remove_partial
from weft.run.checkpoint._copy import commit_copy
from weft.run.checkpoint._files import CHUNK_BYTES, open_plain, verify_file, verify_header
from weft.run.checkpoint._folder import PINNED, named_manifest, step_name
from weft.run.checkpoint._format import MANIFEST, Manifest, StoredFile, read_manifest
from weft.run.checkpoint._read import StoredCheckpoint

logger = logging.getLogger(__name__)

T = TypeVar("T")

_Objects = Mapping[str, Mapping[str, Any]]
"""Name of an object → what the store says of it."""

_NAME = re.compile(r"step-\d{6,}(\.[0-9a-f]{16})?", re.ASCII)
_THREADS = 4
"""Files that are sent or fetched at a time."""
_PART_BYTES = 16 << 20
"""Sent as one request, at most; a larger file is sent in parts of that size."""
_LARGEST_MANIFEST_BYTES = 64 << 20
_S3_CONFIG = {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 2}}
"""The supervisor tries again by itself: a request that hangs must not hold it for minutes."""
_UNREACHABLE = ("Connect", "Timeout", "Closed", "ServerDisconnected", "ClientOSError")
"""Parts of the names of errors that say that nobody answers; they are of packages that need not be installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveInStore:
    """One complete checkpoint of a store."""

    name: str
    """`step-000120`, or that with the token of its save."""
    manifest: Manifest
    objects: _Objects
    unix_time_seconds: float

    @property
    def num_bytes(self) -> int:
        return sum(int(one["size"]) for one in self.objects.values())

    @property
    def is_pinned(self) -> bool:
        return PINNED in self.objects


class CheckpointStore:
    """The checkpoints below one URL.  Methods may be called from any thread, one at a time.

    Raises:
        CheckpointError: by every method: the store cannot be reached or used, in one paragraph that says why.
    """

    def __init__(self, url: str, *, keep: int = 2, owned: Owned | None = None) -> None:
        """Say where checkpoints lie.  No request is made.

        Args:
            url: `s3://bucket/prefix`.
            keep: newest checkpoints that stay when one is added.
            owned: asked before a save is committed, whether the run's folder is still this run's.

        Raises:
            CheckpointError: what reads such URLs is not installed.
        """
        self.url = url.rstrip("/")
        self._keep = keep
        self.owned = owned
        self._files: Any = _file_system(self.url)
        self._root = self.url.partition("://")[2]

    def complete(self) -> list[SaveInStore]:
        """Return the saves whose manifest is sound, newest first.  Damaged manifests are warned about and left out."""
        return self._complete(self._objects())

    def _complete(self, by_name: Mapping[str, _Objects]) -> list[SaveInStore]:
        saves = list[SaveInStore]()
        for name, objects in by_name.items():
            if MANIFEST not in objects:
                continue  # under way, or interrupted
            with tempfile.TemporaryDirectory() as scratch:
                try:
                    manifest = self._fetch_manifest(name, objects, Path(scratch))
                except CheckpointError as problem:
                    logger.warning("checkpoint %s/%s is passed over: %s", self.url, name, problem)
                    continue
            saves.append(
                SaveInStore(
                    name=name,
                    manifest=manifest,
                    objects=objects,
                    unix_time_seconds=_time_of(objects[MANIFEST]),
                )
            )
        return sorted(saves, key=lambda one: (one.manifest.sequence, one.manifest.step), reverse=True)

    def newest_step(self) -> int:
        """Return the finished steps of the newest save; 0 where there is none."""
        saves = self.complete()
        return saves[0].manifest.step if saves else 0

    def claim(self, *, goes_on: bool) -> None:
        """Make sure that a run may add here, before it begins: a note is written, which shows that it can be.

        Args:
            goes_on: the run has loaded, or will load, what lies here.

        Raises:
            CheckpointError: the store cannot be written, or holds saves of another run.
        """
        saves = self.complete()
        if saves and not goes_on:
            raise CheckpointError(
                f"{self.url} holds saves of an earlier run (the newest: {saves[0].name}), and this run begins anew."
                " Go on with that run by --resume, or give another run.checkpoints."
            )
        self._ask(lambda: self._files.pipe_file(f"{self._root}/used-by-weft", b""))

    def copy(self, checkpoint: Path) -> str:
        """Send a checkpoint, digest by digest, and remove the oldest ones.  Return its URL.

        Raises:
            CheckpointError: the checkpoint is damaged, or the store cannot be used.
            LaunchError: another run owns the run's folder by now.
            OSError: the checkpoint cannot be read.
        """
        manifest = named_manifest(checkpoint)
        stored = StoredCheckpoint(checkpoint)
        stored.verify_headers()
        complete = self.complete()
        name = step_name(manifest.step)
        name = f"{name}.{manifest.token}" if name in self._objects() else name
        with ExitStack() as stack:
            # Opened before the first is sent: the checkpoint may be removed meanwhile.
            files = [
                (file, stack.enter_context(open_plain(checkpoint / file.name)))
                for file in (*stored.files, *manifest.indexes)
            ]
            _in_threads(lambda item: self._send(f"{self._root}/{name}/{item[0].name}", *item), files)
        if self.owned is not None:
            self.owned.check()
        sequence = max((one.manifest.sequence for one in complete), default=0) + 1
        text = replace(manifest, sequence=sequence).to_text()
        self._ask(lambda: self._files.pipe_file(f"{self._root}/{name}/{MANIFEST}", text.encode()))
        self._tidy(manifest.step, name)
        return f"{self.url}/{name}"

    def fetch_newest(self, folder: Path) -> Path | None:
        """Bring the newest sound save into a folder of checkpoints of this host; None where there is none.  A damaged
        one is warned about, and the one before it is taken.

        Raises:
            OSError: the folder is full or not writable.
        """
        problems = list[str]()
        by_name = self._objects()
        saves = self._complete(by_name)
        self._warn_of_unfinished(by_name, saves[0].manifest.step if saves else 0)
        for save in saves:
            try:
                path = self._fetch(save.name, save.objects, folder)
            except CheckpointError as problem:
                problems.append(str(problem))
                continue
            if problems:
                logger.warning("loading %s/%s instead, because %s", self.url, save.name, " ".join(problems))
            return path
        if problems:
            raise CheckpointError(f"{self.url} holds no checkpoint that can be loaded: {' '.join(problems)}")
        return None

    def _warn_of_unfinished(self, by_name: Mapping[str, _Objects], step: int) -> None:
        """Say which saves of later steps than `step` have no manifest."""
        for name, objects in by_name.items():
            if MANIFEST not in objects and name.partition(".")[0] > step_name(step):
                logger.warning(
                    "checkpoint %s/%s is passed over: it has no %s, so its save was interrupted",
                    self.url,
                    name,
                    MANIFEST,
                )

    def fetch(self, name: str, folder: Path) -> Path:
        """Bring one save into a folder of checkpoints of this host, every byte compared with its digest.

        Raises:
            CheckpointError: it is damaged.
            OSError: the folder is full or not writable.
        """
        return self._fetch(name, self._objects().get(name, {}), folder)

    def _fetch(self, name: str, objects: _Objects, folder: Path) -> Path:
        with self._scratch(name) as scratch:
            stored = self._fetch_indexes(name, objects, scratch)
            manifest = stored.manifest
            partial = create_partial(folder, manifest.step, f"{secrets.randbits(61):016x}")
        try:
            with self._named(partial, name):
                files = (*stored.files, *manifest.indexes)
                _in_threads(lambda file: self._fetch_verified(name, objects, file, partial), files)
                for file, runs in stored.runs_by_file().items():
                    verify_header(partial, file, runs)
            return commit_copy(folder, partial, manifest, keep=self._keep, owned=None)
        except BaseException:
            remove_partial(partial)
            raise

    @contextmanager
    def opened(self, name: str) -> Generator[StoredCheckpoint]:
        """Give manifest and indexes of one save, without its tensors."""
        with self._scratch(name) as scratch:
            yield self._fetch_indexes(name, self._objects().get(name, {}), scratch)

    def verify(self, name: str) -> None:
        """Read every byte of a save, one file at a time, and compare it with its digest.

        Raises:
            CheckpointError: it is damaged.
        """
        objects = self._objects().get(name, {})
        with self._scratch(name) as scratch:
            stored = self._fetch_indexes(name, objects, scratch)
            runs = stored.runs_by_file()
            for file in stored.files:
                self._fetch_verified(name, objects, file, scratch)
                verify_header(scratch, file.name, runs.get(file.name, []))
                (scratch / file.name).unlink()

    def pin(self, name: str, *, is_pinned: bool) -> None:
        """Keep a save for good, or let it go with the old ones again."""
        key = f"{self._root}/{name}/{PINNED}"
        if is_pinned:
            self._ask(lambda: self._files.pipe_file(key, b""))
        elif PINNED in self._objects().get(name, {}):
            self._ask(lambda: self._files.rm_file(key))

    def remove_old(self, keep: int) -> list[str]:
        """Remove the saves but the newest `keep` and those that are pinned; return their names."""
        old = [save.name for save in self.complete()[keep:] if not save.is_pinned]
        for name in old:
            self._remove(name)
        return old

    def _tidy(self, step: int, newest: str) -> None:
        """Remove older saves, those of the same step, and interrupted ones.  A failure leaves the new save as good."""
        try:
            for name, objects in self._objects().items():
                same_step = name.partition(".")[0] == step_name(step) and PINNED not in objects
                if name != newest and (same_step or MANIFEST not in objects):
                    self._remove(name)
            self.remove_old(self._keep)
        except CheckpointError as problem:
            logger.warning("old checkpoints could not be removed: %s", problem)

    def _remove(self, name: str) -> None:
        """The manifest goes first: what is interrupted leaves nothing that looks complete."""
        objects = self._objects().get(name, {})
        for file in sorted(objects, key=lambda file: file != MANIFEST):
            self._ask(lambda file=file: self._files.rm_file(f"{self._root}/{name}/{file}"))

    def _objects(self) -> Mapping[str, _Objects]:
        """Name of a save → name of an object → what the store says of it."""

        def listing() -> _Objects:
            try:
                return self._files.find(self._root, detail=True)
            except FileNotFoundError as problem:
                if "bucket" in str(problem):
                    raise
                return {}  # nothing has been put there yet

        by_save: dict[str, dict[str, Mapping[str, Any]]] = {}
        for path, entry in self._ask(listing).items():
            parts = path.removeprefix(self._root).strip("/").split("/")
            if len(parts) == 2 and _NAME.fullmatch(parts[0]):
                by_save.setdefault(parts[0], {})[parts[1]] = entry
        return by_save

    def _fetch_manifest(self, name: str, objects: _Objects, scratch: Path) -> Manifest:
        with self._named(scratch, name):
            size = int(objects[MANIFEST]["size"]) if MANIFEST in objects else 0
            if not 0 < size <= _LARGEST_MANIFEST_BYTES:
                raise CheckpointError(
                    f"{scratch / MANIFEST} is missing, empty or too large. Use an earlier checkpoint."
                )
            self._get(f"{name}/{MANIFEST}", scratch / MANIFEST)
            manifest = read_manifest(scratch)
            if name.partition(".")[0] != step_name(manifest.step):
                raise CheckpointError(f"{scratch / MANIFEST} is that of step {manifest.step}: it was put elsewhere.")
            return manifest

    def _fetch_indexes(self, name: str, objects: _Objects, scratch: Path) -> StoredCheckpoint:
        manifest = self._fetch_manifest(name, objects, scratch)
        _in_threads(lambda file: self._fetch_verified(name, objects, file, scratch), manifest.indexes)
        return StoredCheckpoint(scratch)

    def _fetch_verified(self, name: str, objects: _Objects, file: StoredFile, folder: Path) -> None:
        """Bring one file, whose size is compared before anything is read, so that a forged object takes no room."""
        size = int(objects[file.name]["size"]) if file.name in objects else None
        if size != file.size_bytes:
            what = "is missing" if size is None else f"has {size:,} bytes, but {file.size_bytes:,} were written"
            raise CheckpointError(f"{folder / file.name} {what}.")
        self._get(f"{name}/{file.name}", folder / file.name)
        verify_file(folder, file)

    def _get(self, key: str, path: Path) -> None:
        self._ask(lambda: self._files.get_file(f"{self._root}/{key}", str(path)))

    def _send(self, key: str, stored: StoredFile, file: BinaryIO) -> None:
        digest, size = xxhash.xxh3_128(), 0
        if stored.size_bytes <= _PART_BYTES:
            content = file.read(stored.size_bytes + 1)
            digest.update(content)
            size = len(content)
            self._ask(lambda: self._files.pipe_file(key, content))
        else:
            target: Any = self._ask(lambda: self._files.open(key, "wb", block_size=_PART_BYTES))
            try:
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
                    size += len(chunk)
                    self._ask(lambda chunk=chunk: target.write(chunk))
            except BaseException:
                target.discard()
                raise
            self._ask(target.close)
        if size != stored.size_bytes or digest.hexdigest() != stored.digest:
            raise CheckpointError(f"{file.name} does not match its digest: its content changed after it was written.")

    @contextmanager
    def _scratch(self, name: str) -> Generator[Path]:
        """A folder for what is fetched and read at once; errors name the store instead."""
        folder = Path(tempfile.mkdtemp(prefix="weft-store-"))
        try:
            with self._named(folder, name):
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _named(self, folder: Path, name: str) -> Generator[None]:
        """Let errors name the object and not the file that it was brought into."""
        try:
            yield
        except CheckpointError as problem:
            raise CheckpointError(str(problem).replace(str(folder), f"{self.url}/{name}")) from None

    def _ask(self, request: Callable[[], T]) -> T:
        try:
            return request()
        except WeftError:
            raise
        except Exception as problem:  # each package has a family of its own, and botocore's are no OSError
            raise CheckpointError(_sentence(self.url, problem)) from problem


def _file_system(url: str) -> Any:
    scheme = url.partition("://")[0]
    try:
        import fsspec

        settings = {"config_kwargs": _S3_CONFIG} if scheme in ("s3", "s3a") else {}
        file_system: Any = fsspec.filesystem
        return file_system(scheme, use_listings_cache=False, skip_instance_cache=True, **settings)
    except ImportError as problem:
        what = 'Install it: pip install "weft[s3]".' if scheme in ("s3", "s3a") else f"{problem}."
        raise CheckpointError(f"{url} needs a package that is not installed. {what}") from None
    except ValueError as problem:
        raise CheckpointError(f"{url}: {problem}. Use s3://bucket/prefix.") from None


def _sentence(url: str, problem: Exception) -> str:
    """What the error of a store means, and what to change."""
    kind, text = type(problem).__name__, " ".join(str(problem).split())[:300]
    if isinstance(problem, FileNotFoundError) and "bucket" in text:
        return f"{url} cannot be used: its bucket does not exist. Make it, or correct run.checkpoints in the recipe."
    if isinstance(problem, PermissionError):
        return (
            f"{url} cannot be used: access is denied ({text}). Let this machine's credentials list, read, write and"
            " delete there, or choose others, such as by AWS_PROFILE."
        )
    if "Credentials" in kind or "Credentials" in text:
        return (
            f"{url} cannot be used: no credentials were found. Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and"
            " AWS_SECRET_ACCESS_KEY, or run on a machine that has a role."
        )
    if isinstance(problem, ConnectionError | TimeoutError) or any(part in kind for part in _UNREACHABLE):
        return f"{url} cannot be reached ({text}). Check the network, and AWS_ENDPOINT_URL where one is set."
    return f"{url} cannot be used: {kind}: {text}."


def _in_threads(work: Callable[[T], object], items: Iterable[T] | Sequence[T]) -> None:
    """Do it for all of them, some at a time; the first error is raised when those under way have ended."""
    with ThreadPoolExecutor(_THREADS) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in futures:
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            raise


def _time_of(entry: Mapping[str, Any]) -> float:
    when: Any = entry.get("LastModified") or entry.get("mtime") or 0.0
    return when.timestamp() if isinstance(when, datetime.datetime) else float(when)
