"""The console command: its own commands against a real port, and the dispatch to others. Not those others."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import EntryPoint

import pytest

import anabranch
from anabranch import cli, wire

ANSWERS: dict[str, object] = {
    "health": {"status": "ok", "version": "0.1.0", "sglang_version": "9", "model": "tiny", "attention_backend": "x"},
    "stats": dict.fromkeys(wire.Counts.model_fields, 7)
    | {"total_tokens": 99, "free_tokens": None, "tenants": [{"tenant": "team-a", "held_tokens": 5}]},
    "states": {
        "states": [
            {
                "id": "ab" * 16,
                "status": "sealed",
                "input_tokens": 11,
                "generated_tokens": 22,
                "start": 33,
                "context_tokens": 44,
                "refs": [],
                "lease": 299.7,
            },
            {
                "id": "cd" * 16,
                "status": "sealed",
                "input_tokens": 1,
                "generated_tokens": 2,
                "start": 3,
                "context_tokens": 4,
                "lease": 0.2,
                "resident": False,
            },
        ]
    },
}


@pytest.fixture
def url() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers.get("authorization") == "Bearer k"
            body = ANSWERS[self.path.rpartition("/")[2]] if known else {"error": "Unauthorized"}
            self.send_response(200 if known else 401)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    entries: list[EntryPoint] = []
    monkeypatch.setattr(cli, "entry_points", lambda group: entries if group == "anabranch.commands" else [])
    return entries


def echo(argv: list[str]) -> int:
    print("echo", argv)
    return 5


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("ping", ["ok", "tiny"]),
        ("stats", ["held_tokens", f"free_tokens{'-':>21}", "team-a"]),
        ("states", ["ab" * 16, "44", "resident     300s", "evicted        0s", "2 states"]),
    ],
)
def test_looking_at_a_server(url: str, command: str, shown: list[str], capsys: pytest.CaptureFixture[str]):
    assert cli.main([command, "--base-url", url, "--api-key", "k"]) == 0
    out = capsys.readouterr().out
    assert all(part in out for part in shown), out


def test_stats_without_tenants_has_no_table(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(ANSWERS, "stats", {"total_tokens": 99})
    assert cli.main(["stats", "--base-url", url, "--api-key", "k"]) == 0
    assert "tenant" not in capsys.readouterr().out


def test_errors_go_to_stderr_with_status_1(url: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["ping", "--base-url", url, "--api-key", "wrong"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "[unauthorized]" in captured.err and "Traceback" not in captured.err


def test_the_environment_is_used(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("ANABRANCH_BASE_URL", url)
    monkeypatch.setenv("ANABRANCH_API_KEY", "k")
    assert cli.main(["ping"]) == 0
    assert url in capsys.readouterr().out


def test_everything_after_an_added_command_is_its_own(
    added: list[EntryPoint], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("anabranch.cli.echo", echo, raising=False)
    added.append(EntryPoint("serve", "anabranch.cli:echo", "anabranch.commands"))
    assert cli.main(["serve", "--help", "--version", "--model-path", "M", "ping"]) == 5
    assert capsys.readouterr().out == "echo ['--help', '--version', '--model-path', 'M', 'ping']\n"


def test_a_missing_dependency_is_named(added: list[EntryPoint], capsys: pytest.CaptureFixture[str]):
    added.append(EntryPoint("serve", "no_such_package_here:command", "anabranch.commands"))
    assert cli.main(["serve"]) == 1
    err = capsys.readouterr().err
    assert "no_such_package_here" in err and "pip install 'anabranch[server]'" in err


def test_a_command_that_is_not_installed(added: list[EntryPoint], capsys: pytest.CaptureFixture[str]):
    assert cli.main(["model", "pull", "x"]) == 1
    assert "pip install 'anabranch[server]'" in capsys.readouterr().err


def test_help_and_version(added: list[EntryPoint], capsys: pytest.CaptureFixture[str]):
    added.append(EntryPoint("extra", "x:y", "anabranch.commands"))
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0 and all(
        name in out for name in ("serve", "model", "extra", "ping", "states", "stats")
    )
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"anabranch {anabranch.__version__}\n"
    for wrong in ([], ["nonsense"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(wrong)
        assert caught.value.code == 2
