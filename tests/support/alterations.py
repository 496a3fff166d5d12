"""Drawn alterations of a checkpoint's files: by accident, and by somebody who also repairs the digests.

A checkpoint is taken as names and contents, so that one list serves a folder, a folder in memory and an object store.
What only a folder can have (links, pipes, folders in the place of files) is drawn by `alter_folder`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from forge import forge_one, text_of

Files = dict[str, bytes]
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Alteration:
    what: str
    files: Files
    is_forged: bool = False
    """Whether all digests were made to fit again: then other values may be loaded, as documented, but no other files,
    and no code may run."""


@dataclass(frozen=True)
class Case:
    """What is altered: the newest checkpoint, beside one of another step."""

    files: Mapping[str, bytes]
    other: Mapping[str, bytes]
    canary: Path
    """File that code in an altered checkpoint would make."""


def alter(case: Case, draw: random.Random) -> Alteration:
    """Return the files of a checkpoint after one drawn alteration, which differ from what they were."""
    while True:
        how = draw.choice(_HOW)
        altered = how(case, draw)
        if altered.files != case.files:
            return altered


def _flip(case: Case, draw: random.Random) -> Alteration:
    name = draw.choice(sorted(case.files))
    content = bytearray(case.files[name])
    for _ in range(draw.choice((1, 1, 2, 8))):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return Alteration(f"bits of {name}", {**case.files, name: bytes(content)})


def _truncate(case: Case, draw: random.Random) -> Alteration:
    name = draw.choice(sorted(case.files))
    return Alteration(
        f"end of {name} cut off", {**case.files, name: case.files[name][: draw.randrange(len(case.files[name]))]}
    )


def _append(case: Case, draw: random.Random) -> Alteration:
    name = draw.choice(sorted(case.files))
    # Blanks behind the JSON of a manifest change nothing that is read.
    more = draw.randbytes(draw.randrange(1, 40)).replace(b" ", b"x").replace(b"\n", b"x").replace(b"\t", b"x") + b"x"
    return Alteration(f"{len(more)} bytes behind {name}", {**case.files, name: case.files[name] + more})


def _zero(case: Case, draw: random.Random) -> Alteration:
    name = draw.choice(sorted(case.files))
    content = bytearray(case.files[name])
    start = draw.randrange(len(content))
    stop = min(len(content), start + draw.choice((1, 8, 64, 4096)))
    content[start:stop] = bytes(stop - start)
    return Alteration(f"zeros in {name}", {**case.files, name: bytes(content)})


def _remove(case: Case, draw: random.Random) -> Alteration:
    gone = draw.sample(sorted(case.files), draw.choice((1, 1, 2)))
    return Alteration(
        f"{', '.join(gone)} removed", {name: data for name, data in case.files.items() if name not in gone}
    )


def _rename(case: Case, draw: random.Random) -> Alteration:
    """One file under another name, or two under the name of the other."""
    one, two = draw.sample(sorted(case.files), 2)
    files = dict(case.files)
    if draw.random() < 0.5:
        files[one], files[two] = files[two], files[one]
        return Alteration(f"{one} and {two} exchanged", files)
    files[draw.choice((one + ".bak", one.upper(), one.replace("0", "1", 1)))] = files.pop(one)
    return Alteration(f"{one} renamed", files)


def _swap_steps(case: Case, draw: random.Random) -> Alteration:
    """One file, those of one rank, or all but one are those of another step."""
    names = sorted(case.files.keys() & case.other.keys())
    kind = draw.choice(("one", "rank", "tensors", "all but one", "all"))
    name = draw.choice(names)
    taken = {
        "one": [name],
        "rank": [one for one in names if one.startswith(name[:10])],
        "tensors": [one for one in names if one.endswith(".safetensors")],
        "all but one": [one for one in names if one != name],
        "all": names,
    }[kind]
    return Alteration(f"{kind} ({name}) of another step", {**case.files, **{one: case.other[one] for one in taken}})


def _edit(case: Case, draw: random.Random) -> Alteration:
    """A field of the manifest or of an index is another, as by somebody with an editor; the digests stay."""
    name = draw.choice([one for one in sorted(case.files) if one.endswith(".json")])
    document = json.loads(case.files[name])
    what, changed = forge_one(document, draw)
    if json.dumps(changed, sort_keys=True) == json.dumps(document, sort_keys=True):
        return Alteration("nothing", dict(case.files))
    return Alteration(f"{name}: {what}", {**case.files, name: text_of(changed)})


def _hostile(case: Case, draw: random.Random) -> Alteration:
    """What is to exhaust a reader of JSON, or to run: pickles, too."""
    name = draw.choice(sorted(case.files))
    touch = f"cos\nsystem\n(S'touch {case.canary}'\ntR.".encode()
    content = draw.choice(
        (
            b"[" * 100_000,
            b'{"manifest":' * 50_000,
            b'{"a": ' + b"9" * 5000 + b"}",
            b'{"digest": 1e999, "manifest": {}}',
            b'{"digest": "", "digest": "x", "manifest": {}, "manifest": {}}',
            touch,
            b"\x80\x04" + touch,
            (1 << 60).to_bytes(8, "little") + b"{}",
            (4).to_bytes(8, "little") + b"[[[[",
            b"",
        )
    )
    return Alteration(f"{content[:20]!r} … as {name}", {**case.files, name: content})


def _forged_manifest(case: Case, draw: random.Random) -> Alteration:
    manifest = json.loads(case.files[MANIFEST])["manifest"]
    what, changed = forge_one(manifest, draw)
    return Alteration(f"forged manifest: {what}", {**case.files, MANIFEST: sealed(changed)}, is_forged=True)


def _forged_index(case: Case, draw: random.Random) -> Alteration:
    name = draw.choice([one for one in sorted(case.files) if one.endswith(".json") and one != MANIFEST])
    what, changed = forge_one(json.loads(case.files[name]), draw)
    return Alteration(f"forged {name}: {what}", with_index(case.files, name, text_of(changed)), is_forged=True)


def _forged_path(case: Case, draw: random.Random) -> Alteration:
    """Files outside of the checkpoint, named by one whose digests fit."""
    name = draw.choice([one for one in sorted(case.files) if one.endswith(".json") and one != MANIFEST])
    index = json.loads(case.files[name])
    old = draw.choice(index["files"])["name"]
    new = draw.choice((f"../step-000010/{old}", f"/etc/{old}", str(case.canary), f"./{old}", f"{old}\0", "..", ""))
    text = case.files[name].decode().replace(json.dumps(old), json.dumps(new))
    return Alteration(f"{name} names {new!r}", with_index(case.files, name, text.encode()))


def _forged_header(case: Case, draw: random.Random) -> Alteration:
    """A tensor file whose header says another dtype, shape, place or name; every digest is made to fit."""
    name = draw.choice([one for one in sorted(case.files) if one.endswith(".safetensors")])
    content = case.files[name]
    length = int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    key = draw.choice([one for one in header if one != "__metadata__"])
    entry = header[key]
    how = draw.choice(("dtype", "shape", "data_offsets", "name", "length"))
    if how == "dtype":
        entry["dtype"] = draw.choice(("F64", "F16", "BF16", "I32", "U8", "F8_E5M2", "object", "F32 "))
    elif how == "shape":
        entry["shape"] = draw.choice(([], [0], [1 << 40], [-1], [*entry["shape"], 2], [2**62, 2**62], "x", None))
    elif how == "data_offsets":
        entry["data_offsets"] = draw.choice(([0, 1 << 62], [4, 2], [-8, 0], [1, entry["data_offsets"][1] + 1], [], 7))
    elif how == "name":
        header[f"{key}/more"] = header.pop(key)
    if how != "length" and header == json.loads(content[8 : 8 + length]):
        return Alteration("nothing", dict(case.files))
    text = json.dumps(header).encode()
    size = draw.choice((0, 1, 1 << 40, (1 << 64) - 1)) if how == "length" else len(text)
    changed = size.to_bytes(8, "little") + text + content[8 + length :]
    index_name = f"{name[:10]}.json"
    index = json.loads(case.files[index_name])
    for file in index["files"]:
        if file["name"] == name:
            file.update(size_bytes=len(changed), digest=xxhash.xxh3_128_hexdigest(changed))
    files = with_index({**case.files, name: changed}, index_name, text_of(index))
    return Alteration(f"header of {name}: {how} of {key}", files)


def sealed(manifest: Any) -> bytes:
    """A manifest with the digest that fits it."""
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return text_of({"digest": xxhash.xxh3_128_hexdigest(canonical.encode()), "manifest": manifest})


def with_index(files: Mapping[str, bytes], name: str, index: bytes) -> Files:
    """The files with another index, and a manifest that fits it."""
    manifest = json.loads(files[MANIFEST])["manifest"]
    for entry in manifest["indexes"]:
        if entry["name"] == name:
            entry.update(size_bytes=len(index), digest=xxhash.xxh3_128_hexdigest(index))
    return {**files, name: index, MANIFEST: sealed(manifest)}


_HOW: tuple[Callable[[Case, random.Random], Alteration], ...] = (
    *(_flip, _flip, _flip, _truncate, _append, _zero, _remove, _rename, _swap_steps, _edit, _hostile),
    *(_forged_manifest, _forged_index, _forged_path, _forged_header),
)


def alter_folder(folder: Path, draw: random.Random) -> str:
    """Put something else in the place of a file of a checkpoint's folder."""
    name = draw.choice(sorted(path.name for path in folder.iterdir()))
    path, aside = folder / name, folder.parent / f"aside-{name}"
    how = draw.choice(("link", "dangling link", "link of the folder", "pipe", "folder", "giant", "moved"))
    if how == "link":
        path.rename(aside)
        path.symlink_to(aside)
    elif how == "dangling link":
        path.unlink()
        path.symlink_to("/nowhere")
    elif how == "link of the folder":
        folder.rename(folder.parent / "aside")
        folder.symlink_to(folder.parent / "aside")
    elif how == "moved":
        folder.rename(folder.with_name("step-000030"))
    elif how == "giant":
        os.truncate(path, 1 << 40)  # sparse
    else:
        path.unlink()
        os.mkfifo(path) if how == "pipe" else path.mkdir()
    return f"{how} at {name}"


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder hold these files and nothing else, also where something else had its name."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
