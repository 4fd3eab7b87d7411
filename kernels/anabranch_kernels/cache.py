"""Compiled kernels on disk, found again by what they were made from. Safe for any number of processes at once.

It compiles nothing and knows no format. A file that is not whole counts as not there.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size


def directory() -> Path:
    """`ANABRANCH_KERNEL_CACHE`, or `~/.cache/anabranch/kernels`."""
    return Path(os.environ.get("ANABRANCH_KERNEL_CACHE") or Path.home() / ".cache" / "anabranch" / "kernels")


def key(*parts: str) -> str:
    """The name of what is made from `parts`: sources, options, the compiler's version."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:".encode())
        digest.update(part.encode())
    return digest.hexdigest()


def path(name: str) -> Path:
    """Where `name` is kept, for those who open the file themselves: its content, then a digest."""
    return directory() / name


def load(name: str) -> bytes | None:
    """What was stored under `name`; None if nothing was, or if it is not whole."""
    try:
        stored = path(name).read_bytes()
    except OSError:
        return None
    content, digest = stored[:-_DIGEST], stored[-_DIGEST:]
    return content if hashlib.sha256(content).digest() == digest else None


def store(name: str, content: bytes) -> None:
    """Keep `content` under `name`. A directory that cannot be written only costs the next process its time."""
    try:
        directory().mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=directory(), prefix=name[:16])
        with os.fdopen(descriptor, "wb") as file:
            file.write(content + hashlib.sha256(content).digest())
        os.replace(temporary, path(name))
    except OSError:
        return
