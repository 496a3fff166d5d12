"""Builds the shared-memory engine; everything else about the package is in pyproject.toml.

The engine is a plain shared library (no Python or torch headers), so that it serves every Python and torch.  Without a
C++ compiler the build goes on with a warning, and Weft says at run time which slower way it takes.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/weft/comm/shared_memory")


def described() -> ModuleType:
    """The list of sources, loaded from its file: importing `weft.comm` would need torch."""
    spec = importlib.util.spec_from_file_location("weft_sources", FOLDER / "_sources.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildLibrary(build_ext):
    """Names the library without the interpreter's tag: it does not depend on the interpreter."""

    def build_extension(self, ext: Extension) -> None:
        # One of an earlier build must not stay where this one fails: nobody would understand it.
        Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        super().build_extension(ext)

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"


def main() -> None:
    sources = described()
    extension = Extension(
        f"weft.comm.shared_memory.{Path(sources.LIBRARY).stem}",
        [str(FOLDER / name) for name in sources.SOURCES],
        depends=[str(FOLDER / name) for name in (*sources.HEADERS, "_sources.py")],
        define_macros=[("WEFT_DIGEST", f'"{sources.digest()}"')],
        extra_compile_args=list(sources.COMPILE_FLAGS),
        extra_link_args=["-pthread"],
        language="c++",
        optional=True,
    )
    linux = sys.platform.startswith("linux")  # futexes, memfd, /proc
    setup(ext_modules=[extension] if linux else [], cmdclass={"build_ext": BuildLibrary})


main()
