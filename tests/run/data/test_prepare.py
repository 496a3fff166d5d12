"""From files to prepared shards: what goes in comes out, whatever is killed, cut short or wrong on the way."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import resource
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from weft.errors import DataError
from weft.process import children_of
from weft.run.data import _prepare as prepare_module
from weft.run.data._sources import cut, list_sources, read_documents
from weft.run.data.preparation import ConsoleProgress, PreparedCorpus, is_prepared, open_corpus, prepare

VOCABULARY = 400


def make(folder: Path, *sources: Path, workers: int = 1, vocabulary_size: int = VOCABULARY) -> PreparedCorpus:
    return prepare(list(sources), vocabulary_size=vocabulary_size, folder=folder, workers=workers)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A few files of the standard library, enough for several shards of 64 KiB."""
    folder = tmp_path / "library"
    folder.mkdir()
    for name in ("ast", "argparse", "json/decoder", "random", "shlex", "textwrap"):
        source = Path(sysconfig.get_path("stdlib"), f"{name}.py")
        (folder / source.name).write_bytes(source.read_bytes())
    return folder


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "_SMALLEST_SHARD_BYTES", 1 << 16)


def test_documents_come_back_in_order_with_separators(tmp_path: Path, library: Path) -> None:
    corpus = make(tmp_path / "out", library)
    tokenizer = corpus.tokenizer()
    tokens = corpus.stream().read(0, corpus.num_tokens)
    ends = np.flatnonzero(tokens == corpus.manifest.separator)
    texts = [tokenizer.decode(part[part != 0].tolist()) for part in np.split(tokens, ends + 1)[:-1]]
    expected = [
        text for segment in cut(list_sources([library]).files, 1 << 22) for text in read_documents(segment, "text")
    ]
    assert texts == expected
    assert "".join(texts) == "".join(path.read_text("utf-8") for path in sorted(library.iterdir()))
    assert corpus.num_documents == len(expected) > 6
    assert corpus.manifest.dtype == "<u2"
    assert "6 files" in corpus.description


def test_text_that_spells_the_separator_forges_no_border(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one <|endoftext|> two")
    corpus = make(tmp_path / "out", tmp_path / "a.txt")
    tokens = corpus.stream().read(0, corpus.num_tokens)
    assert (tokens == corpus.manifest.separator).sum() == 1
    assert corpus.tokenizer().decode(tokens[:-1].tolist()) == "one <|endoftext|> two"


def test_jsonl_and_parquet_hold_the_same_documents(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"document {number} " + "word " * (number % 7) for number in range(500)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=90)
    one, two = make(tmp_path / "1", tmp_path / "a.jsonl"), make(tmp_path / "2", tmp_path / "a.parquet")
    assert one.num_documents == two.num_documents == 500
    for corpus in (one, two):
        tokens = corpus.stream().read(0, corpus.num_tokens)
        pieces = np.split(tokens, np.flatnonzero(tokens == 0) + 1)[:-1]
        assert [corpus.tokenizer().decode(piece[:-1].tolist()) for piece in pieces] == texts


def test_segments_of_a_file_share_no_record_and_lose_none(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * (number * 37 % 91)}) + "\n" for number in range(1, 90)))
    whole = [text for segment in cut(list_sources([path]).files, 1 << 20) for text in read_documents(segment, "text")]
    assert len(whole) == 89
    for size in (1, 7, 64, 1000):
        parts = cut(list_sources([path]).files, size)
        assert [text for segment in parts for text in read_documents(segment, "text")] == whole


@pytest.mark.usefixtures("small_shards")
def test_workers_do_not_change_a_byte(tmp_path: Path, library: Path) -> None:
    one = make(tmp_path / "1", library)
    two = make(tmp_path / "2", library, workers=2)
    assert len(one.manifest.shards) > 2
    assert bytes_of(one.folder) == bytes_of(two.folder)
    assert one.fingerprint == two.fingerprint


def test_fingerprint_follows_content_and_settings_not_paths(tmp_path: Path, library: Path) -> None:
    first = prepare([library], vocabulary_size=VOCABULARY, cache=tmp_path / "cache")
    assert first.folder.name == first.fingerprint
    assert prepare([library], vocabulary_size=VOCABULARY, cache=tmp_path / "cache").folder == first.folder
    moved = library.rename(tmp_path / "moved")
    assert prepare([moved], vocabulary_size=VOCABULARY, cache=tmp_path / "cache").folder == first.folder
    other = prepare([moved], vocabulary_size=VOCABULARY + 1, cache=tmp_path / "cache")
    assert other.fingerprint != first.fingerprint
    (moved / "shlex.py").write_text("changed")
    assert prepare([moved], vocabulary_size=VOCABULARY, cache=tmp_path / "cache").fingerprint != first.fingerprint
    with pytest.raises(DataError, match="already holds other prepared data"):
        make(first.folder, moved)


KILLED = """
import sys
from weft.run.data import _prepare
from weft.run.data.preparation import prepare
_prepare._SMALLEST_SHARD_BYTES = 1 << 16
prepare([sys.argv[1]], vocabulary_size=int(sys.argv[3]), folder=sys.argv[2], workers=int(sys.argv[4]))
"""


def start_preparing(library: Path, folder: Path, workers: int) -> subprocess.Popen[bytes]:
    arguments = [str(library), str(folder), str(VOCABULARY), str(workers)]
    return subprocess.Popen([sys.executable, "-c", KILLED, *arguments])


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(("kept", "how"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (3, signal.SIGINT)])
def test_stopped_preparation_goes_on_and_ends_with_the_same_bytes(
    tmp_path: Path, library: Path, kept: int, how: signal.Signals
) -> None:
    whole = make(tmp_path / "whole", library)
    folder = tmp_path / "killed"
    child = start_preparing(library, folder, workers=2)
    while len(list(folder.glob("shard-*.json"))) < kept or not folder.exists():
        assert child.poll() is None or kept == len(whole.manifest.shards)
        time.sleep(0.001)
    child.send_signal(how)
    child.wait(10)
    finished = {path: path.stat().st_mtime_ns for path in folder.glob("shard-*.json")}
    if not (folder / "manifest.json").exists():
        (folder / "shard-00002.tokens.12345.tmp").write_bytes(b"half")
    make(folder, library)
    assert bytes_of(folder) == bytes_of(whole.folder)
    assert all(path.stat().st_mtime_ns == written for path, written in finished.items())


@pytest.mark.usefixtures("small_shards")
def test_damaged_finished_shard_is_made_again(tmp_path: Path, library: Path) -> None:
    whole = make(tmp_path / "whole", library)
    before = bytes_of(whole.folder)
    (whole.folder / "manifest.json").unlink()
    damage = whole.folder / "shard-00001.tokens"
    damage.write_bytes(damage.read_bytes()[:-2] + b"\1\1")
    (whole.folder / "shard-00002.json").write_text("{")
    make(whole.folder, library)
    assert bytes_of(whole.folder) == before


@pytest.mark.usefixtures("small_shards")
def test_two_preparations_at_once_agree(tmp_path: Path, library: Path) -> None:
    whole = make(tmp_path / "whole", library)
    folder = tmp_path / "shared"
    children = [start_preparing(library, folder, workers=1) for _ in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]
    results = bytes_of(folder)
    assert results == bytes_of(whole.folder)


@pytest.mark.usefixtures("small_shards")
def test_killed_helper_is_replaced(tmp_path: Path, library: Path) -> None:
    whole = make(tmp_path / "whole", library)
    stopped = threading.Event()

    def kill_one() -> None:
        while not stopped.is_set():
            if pids := children_of(os.getpid()):
                os.kill(pids[0], signal.SIGKILL)
                return
            time.sleep(0.001)

    killer = threading.Thread(target=kill_one)
    killer.start()
    make(tmp_path / "out", library, workers=2)
    stopped.set()
    killer.join()
    assert bytes_of(tmp_path / "out") == bytes_of(whole.folder)


def test_corruption_is_found(tmp_path: Path, library: Path) -> None:
    corpus = make(tmp_path / "out", library)
    tokens, documents = corpus.folder / "shard-00000.tokens", corpus.folder / "shard-00000.documents"
    for path in (tokens, documents):
        good = path.read_bytes()
        for place in (0, len(good) // 2, len(good) - 1):
            bad = bytearray(good)
            bad[place] ^= 1 << (place % 8)
            path.write_bytes(bad)
            with pytest.raises(DataError, match="is corrupt: its xxh3 is"):
                open_corpus(corpus.folder)
            with pytest.raises(DataError, match="is corrupt"):
                corpus.verify()
        path.write_bytes(good[:-1])
        with pytest.raises(DataError, match="cut short"):
            open_corpus(corpus.folder, verify=False)
        path.write_bytes(good)
    assert open_corpus(corpus.folder) == corpus
    tokens.unlink()
    with pytest.raises(DataError, match="is missing"):
        open_corpus(corpus.folder, verify=False)


def test_damaged_manifest_is_refused(tmp_path: Path, library: Path) -> None:
    corpus = make(tmp_path / "out", library)
    manifest = corpus.folder / "manifest.json"
    good = manifest.read_text()
    for bad in ("", "[]", "{}", good[:-20], good.replace('"separator"', '"seperator"')):
        manifest.write_text(bad)
        with pytest.raises(DataError, match="is damaged"):
            open_corpus(corpus.folder)
    manifest.write_text(good.replace("weft-tokens-1", "weft-tokens-9"))
    with pytest.raises(DataError, match="has format 'weft-tokens-9'; this Weft reads"):
        open_corpus(corpus.folder)
    manifest.unlink()
    with pytest.raises(DataError, match="holds no prepared data"):
        open_corpus(corpus.folder)
    assert not is_prepared(corpus.folder)


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        (['{"text": "a"}', "", '{"text": oops}'], r"a\.jsonl, line 3, column 10: not JSON"),
        (['{"text": "a"}', '{"txt": "b"}'], r'a\.jsonl, line 2: .*field "text" \(it has txt\)\. Did you mean txt\?'),
        (['{"text": 3}'], r"line 1: the field \"text\" holds a number, and a text is wanted"),
        (['["text"]'], r"line 1: .*it is no object"),
        (['{"text": "a"}', '{"text": "\\ud83d"}'], r"line 2: the text has half a character \(\\ud83d"),
        (["9" * 5000], r"line 1: not JSON \(Exceeds the limit"),
        (["[" * 100_000], r"line 1: not JSON"),
    ],
)
def test_bad_jsonl_line_is_named(tmp_path: Path, lines: list[str], match: str) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=match):
        make(tmp_path / "out", tmp_path / "a.jsonl")


@pytest.mark.usefixtures("small_shards")
def test_bad_line_found_by_a_helper_is_named(tmp_path: Path) -> None:
    good = [json.dumps({"text": f"document {number} of many"}) for number in range(40_000)]
    good[39_000] = "broken"
    (tmp_path / "a.jsonl").write_text("\n".join(good))
    with pytest.raises(DataError, match="line 39001, column 1: not JSON"):
        make(tmp_path / "out", tmp_path / "a.jsonl", workers=2)


def test_bad_sources_are_refused(tmp_path: Path) -> None:
    def refused(match: str, *sources: Path | str) -> None:
        with pytest.raises(DataError, match=match):
            prepare(list(sources), vocabulary_size=VOCABULARY, cache=tmp_path / "cache")

    refused("does not exist .* Did you mean stdlib", "stdlb")
    (tmp_path / "corpus.txt").write_text("text")
    refused("does not exist .* Did you mean corpus.txt", tmp_path / "corpos.txt")
    (tmp_path / "empty.txt").touch()
    refused("is empty: 1 files with 0 bytes", tmp_path / "empty.txt")
    (tmp_path / "folder").mkdir()
    refused("has no text, .jsonl or .parquet", tmp_path / "folder")
    (tmp_path / "binary.txt").write_bytes(b"a\0b")
    refused("is not text: it contains NUL", tmp_path / "binary.txt")
    (tmp_path / "latin.txt").write_bytes(b"good\ngood\ncaf\xe9 bad")
    refused(r"is not UTF-8: byte 0xe9 at offset 13, line 3\. Convert it", tmp_path / "latin.txt")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    refused("is not a readable Parquet file", tmp_path / "bad.parquet")


def test_unreadable_folder_and_file_are_refused() -> None:
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "secret").mkdir()
        (folder / "secret.txt").write_text("text")
        try:
            folder.chmod(0o755)
            (folder / "secret").chmod(0)
            (folder / "secret.txt").chmod(0)
            if user == 0:  # root may read everything; nobody may not
                os.seteuid(65534)
            with pytest.raises(DataError, match="secret cannot be read: Permission denied. .*chmod"):
                list_sources([folder / "secret"])
            with pytest.raises(DataError, match="secret.txt cannot be read: Permission denied. .*chmod"):
                list_sources([folder / "secret.txt"])
        finally:
            os.seteuid(user)
            (folder / "secret").chmod(0o700)


def test_full_disk_is_an_error_and_finished_shards_stay(tmp_path: Path, library: Path) -> None:
    whole = make(tmp_path / "whole", library)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
    try:
        with pytest.raises(DataError, match="could not be written to .*too large.* need about .* MB"):
            make(tmp_path / "out", library)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    make(tmp_path / "out", library)
    assert bytes_of(tmp_path / "out") == bytes_of(whole.folder)


def test_only_text_is_taken_from_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    (folder / ".hidden").mkdir(parents=True)
    (folder / ".hidden" / "a.txt").write_text("hidden")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / "gone.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "pipe")
    (folder / "b.md").write_text("seen")
    listing = list_sources([folder])
    assert [Path(file.path).name for file in listing.files] == ["b.md"]
    assert listing.notes == ("3 files left out that are not text",)


def test_cache_that_cannot_be_written_is_refused(tmp_path: Path, library: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot be written .* Set data.cache"):
        prepare([library], vocabulary_size=VOCABULARY, cache=tmp_path / "file" / "cache")


def test_tokenizers_are_checked(tmp_path: Path, library: Path) -> None:
    corpus = make(tmp_path / "out", library)
    again = prepare([library], vocabulary_size=900, tokenizer=corpus.tokenizer_path, folder=tmp_path / "again")
    assert again.fingerprint == corpus.fingerprint
    with pytest.raises(DataError, match=r"has 400 tokens, but the model's vocabulary_size is 300. Set .* = 512"):
        prepare([library], vocabulary_size=300, tokenizer=corpus.tokenizer_path, folder=tmp_path / "small")
    with pytest.raises(DataError, match="cannot hold 256 bytes and 2 special tokens"):
        make(tmp_path / "tiny", library, vocabulary_size=200)
    with pytest.raises(DataError, match="does not exist"):
        prepare([library], vocabulary_size=300, tokenizer=tmp_path / "none.json", folder=tmp_path / "small")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizer"):
        prepare([library], vocabulary_size=300, tokenizer=tmp_path / "bad.json", folder=tmp_path / "small")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "plain.json"))
    with pytest.raises(DataError, match="has no end-of-text token"):
        prepare([library], vocabulary_size=300, tokenizer=tmp_path / "plain.json", folder=tmp_path / "small")


def test_splits_follow_the_hash_of_the_text(tmp_path: Path) -> None:
    texts = [f"document number {number}" for number in range(600)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, *texts]))
    corpus = make(tmp_path / "out", tmp_path / "a.jsonl")

    def documents(split: str, fraction: float) -> list[str]:
        stream = corpus.stream(split, fraction)  # type: ignore[arg-type]
        tokens = stream.read(0, len(stream))
        pieces = np.split(tokens, np.flatnonzero(tokens == 0) + 1)[:-1]
        return [corpus.tokenizer().decode(piece[:-1].tolist()) for piece in pieces]

    train, validation = documents("train", 0.2), documents("validation", 0.2)
    assert set(train) | set(validation) == set(texts)
    assert not set(train) & set(validation)
    assert len(train) + len(validation) == 1200
    assert 0.15 < len(validation) / 1200 < 0.25
    assert documents("all", 0.0) == [*texts, *texts]
    assert len(documents("validation", 1e-9)) == 2
    assert documents("validation", 1.0) == [*texts, *texts]


def test_split_of_one_document_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("only one")
    corpus = make(tmp_path / "out", tmp_path / "a.txt")
    with pytest.raises(DataError, match="train split of .* has no documents: .* set validation_fraction = 0"):
        corpus.stream("train", 0.1)


def test_wide_vocabulary_is_stored_in_four_bytes(tmp_path: Path, library: Path) -> None:
    corpus = make(tmp_path / "out", library)
    fields = json.loads(corpus.tokenizer_path.read_text())
    fields["added_tokens"].append({**fields["added_tokens"][0], "id": 70_000, "content": "<|far|>"})
    fields["model"]["vocab"]["<|far|>"] = 70_000
    (tmp_path / "wide.json").write_text(json.dumps(fields))
    wide = prepare([library], vocabulary_size=80_000, tokenizer=tmp_path / "wide.json", folder=tmp_path / "wide")
    assert wide.manifest.dtype == "<u4"
    assert wide.vocabulary_size == 70_001
    assert np.array_equal(wide.stream().read(0, 10_000), corpus.stream().read(0, 10_000))


def test_standard_library_is_listed_in_order() -> None:
    listing = list_sources(["stdlib"])
    names = [file.path for file in listing.files]
    assert len(names) > 500
    assert all(name.endswith(".py") for name in names)
    assert not any(part in name for name in names for part in ("site-packages", "__pycache__"))
    assert list_sources(["stdlib"]) == listing


def test_progress_is_a_bar_only_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, plain = Terminal(), io.StringIO()
    for stream in (terminal, plain):
        progress = ConsoleProgress(stream)
        progress("tokenizer", 0, 0)
        for done in (1, 2, 3, 4):
            progress("tokens", done, 4)
    assert "█" in terminal.getvalue()
    assert plain.getvalue() == "tokenizer\ntokens    25%\ntokens    100%\n"


def test_manifest_round_trip(tmp_path: Path, library: Path) -> None:
    corpus = make(tmp_path / "out", library)
    fields = json.loads((corpus.folder / "manifest.json").read_text())
    assert fields == json.loads(json.dumps(dataclasses.asdict(corpus.manifest)))
