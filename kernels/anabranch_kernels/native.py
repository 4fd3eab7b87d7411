"""C++ of this package as a shared library: compiled by the system's compiler at first use, then kept on disk.

It knows nothing of what it compiles. CUDA is compiled elsewhere (`jit.py`).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from anabranch_kernels import cache

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")


class NoCompiler(Exception):
    """C++ cannot be compiled here, or not be kept, or not be loaded; the reason in one line."""


def load(source: str, headers: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library compiled from `csrc/<source>`, which includes `csrc/<headers>`. Raises NoCompiler.

    What is on disk is loaded only if it is whole: a library that is cut off would kill the process.
    """
    compiler, version = _compiler()
    texts = [(SOURCES / name).read_text() for name in (source, *headers)]
    name = f"{Path(source).stem}-{cache.key(version, *FLAGS, *texts)[:32]}.so"
    if cache.load(name) is None:
        cache.store(name, _compiled(compiler, SOURCES / source))
    if cache.load(name) is None:
        raise NoCompiler(f"compiled files cannot be kept in {cache.directory()}: set ANABRANCH_KERNEL_CACHE")
    try:
        return ctypes.CDLL(str(cache.path(name)))
    except OSError as error:
        raise NoCompiler(f"{cache.path(name)} cannot be loaded: {error}") from error


def _compiler() -> tuple[str, str]:
    """Path of the compiler, `$CXX` or the first there is, and what it says of its version and target."""
    named = os.environ.get("CXX")
    tried = (named,) if named else COMPILERS
    for name in tried:
        path = shutil.which(name)
        if path:
            return path, _run([path, "--version"]) + _run([path, "-dumpmachine"])
    raise NoCompiler(f"no C++ compiler ({', '.join(tried)}) on the path")


def _compiled(compiler: str, source: Path) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "library.so"
        _run([compiler, *FLAGS, "-o", str(library), str(source)])
        return library.read_bytes()


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
        raise NoCompiler(f"{command[0]} fails: {lines[0]}")
    return done.stdout
