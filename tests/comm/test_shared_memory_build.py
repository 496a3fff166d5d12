"""How the C++ engine is built, checked, and kept clean of data races."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from weft.comm.shared_memory import engine
from weft.comm.shared_memory._arena import Arena
from weft.comm.shared_memory._call import DTYPES, OPS
from weft.comm.shared_memory._sources import COMPILE_FLAGS, FOLDER, HEADERS, LIBRARY, SOURCES, digest
from weft.errors import CollectiveError

HARNESS = Path(__file__).with_name("shared_memory_harness.cpp")
COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def test_every_source_is_listed() -> None:
    assert {path.name for path in FOLDER.glob("*.[ch]pp")} == {*SOURCES, *HEADERS}
    assert all(len(path.read_text().splitlines()) < 500 for path in FOLDER.glob("*.[ch]pp"))
    assert not {"-march=native", "-ffast-math"} & set(COMPILE_FLAGS)


def test_the_library_here_is_built_from_the_sources_here() -> None:
    library = engine.load_library()
    assert library is not None, f"not built; run {engine.REBUILD}"
    assert library.weft_digest().decode() == digest()


@needs_compiler
def test_a_library_of_other_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "other.cpp"
    source.write_text('extern "C" const char* weft_digest() { return "0123456789abcdef"; }\n')
    subprocess.run([str(COMPILER), "-shared", "-fPIC", str(source), "-o", str(tmp_path / LIBRARY)], check=True)
    monkeypatch.setattr(engine, "FOLDER", tmp_path)
    with pytest.raises(CollectiveError, match=r"built from other sources \(0123456789abcdef\) .* build_ext --inplace"):
        engine.load_library()
    monkeypatch.setattr(engine, "FOLDER", tmp_path / "nowhere")
    assert engine.load_library() is None


def test_which_reductions_are_defined() -> None:
    library = engine.load_library()
    assert library is not None
    for dtype, number in DTYPES.items():
        defined = {op for index, op in enumerate(OPS) if library.weft_is_defined(number, index)}
        floating, truth = dtype.is_floating_point, dtype is torch.bool
        assert ("band" in defined) is not floating
        assert ("avg" in defined) is not truth
        assert {"sum", "product", "min", "max"} <= defined
    assert ctypes.string_at(library.weft_kernel_variant()) in (b"avx512", b"avx2", b"baseline")


@needs_compiler
def test_threads_as_ranks_are_free_of_races(tmp_path: Path) -> None:
    program = tmp_path / "harness"
    sources = [str(FOLDER / name) for name in SOURCES if name != "api.cpp"]
    flags = [flag for flag in COMPILE_FLAGS if flag != "-O3"]
    subprocess.run(
        [str(COMPILER), *flags, "-O1", "-g", "-fsanitize=thread", f"-I{FOLDER}", str(HARNESS), *sources]
        + ["-o", str(program)],
        check=True,
    )
    done = subprocess.run([str(program), "60"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "ok\n"
    assert "WARNING" not in done.stderr


def test_an_arena_joins_what_is_given_back() -> None:
    arena = Arena(5 * 4096)
    pieces = [arena.take(4096), arena.take(1), arena.take(5000)]
    assert pieces == [0, 4096, 8192]
    assert arena.take(8000) is None
    assert arena.taken_bytes == 4 * 4096
    for start in (8192, 0, 4096):
        arena.give_back(start)
    assert arena.taken_bytes == 0
    assert arena.take(5 * 4096) == 0
