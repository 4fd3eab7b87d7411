"""Every code block of the README and of the documentation is linted and executed.

Python blocks run against a fake server, whatever address they name; a comment `# > text` is a line that must be
printed. Shell blocks are not run: what they call must exist.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import anabranch.client
from anabranch import cli
from anabranch.testing import FakeServer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "cookbook").rglob("*.md"))]
BLOCK = re.compile(r"^(?P<indent> *)```(?P<kind>\w+)\n(?P<body>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
COMMANDS = {*cli.ADDED, "ping", "states", "stats"}


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is that of its first line of code."""

    path: Path
    line: int
    kind: str
    code: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def blocks(*kinds: str) -> Iterator[Block]:
    for path in PAGES:
        text = path.read_text()
        for match in BLOCK.finditer(text):
            if match["kind"] in kinds:
                line = text.count("\n", 0, match.start("body")) + 1
                yield Block(path, line, match["kind"], textwrap.dedent(match["body"]))


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_block_runs(block: Block, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer()
    monkeypatch.setattr(anabranch.client, "HTTPTransport", lambda _: server)
    # The line numbers of a traceback are those of the page.
    tree = ast.increment_lineno(ast.parse(block.code, str(block.path)), block.line - 1)
    code = compile(tree, str(block.path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    running = eval(code, {"__name__": "__main__"})
    if inspect.iscoroutine(running):
        asyncio.run(running)
    expected = [line.partition("# > ")[2].strip() for line in block.code.splitlines() if "# > " in line]
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert not expected or printed == expected


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_block_is_in_style(block: Block) -> None:
    ruff = [sys.executable, "-m", "ruff"]
    # F704: await outside of a function, which notebooks and these pages allow.
    for words in (["check", "--ignore", "F704"], ["format", "--diff"]):
        done = subprocess.run(
            [*ruff, *words, "--stdin-filename", "block.py", "-"],
            input=block.code, capture_output=True, text=True, cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", blocks("bash", "console", "sh"), ids=str)
def test_shell_block_calls_what_exists(block: Block) -> None:
    for line in block.code.splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"\w+=", words[0]):
            words.pop(0)
        if words:
            check_command(words)


def check_command(words: list[str]) -> None:
    match words:
        case ["anabranch", command, *_]:
            assert command in COMMANDS
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module.partition(".")[0]) is not None, module
            if module.startswith(("cookbook.", "anabranch")):
                assert importlib.util.find_spec(module) is not None, module
        case ["pip", "install", *_]:
            pass
        case ["git", "clone", *_] | ["cd", *_]:
            pass
        case ["bash", script, *_] | [script, *_]:
            assert "/" in script, f"unknown command: {script}"
            assert (ROOT / script).is_file(), script
            assert (ROOT / script).stat().st_mode & 0o100, f"{script} is not executable"


def test_there_are_blocks_and_no_other_kinds() -> None:
    assert len(list(blocks("python"))) >= 4
    fences = sum(len(re.findall(r"^ *```\w+$", page.read_text(), re.MULTILINE)) for page in PAGES)
    assert fences == len(list(blocks("python", "bash", "text", "json", "toml"))), "a block of a kind that nobody checks"


def test_configuration_can_be_read() -> None:
    for block in blocks("json"):
        json.loads(block.code)
    for block in blocks("toml"):
        tomllib.loads(block.code)


def test_links_inside_the_repository_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "cookbook").rglob("*.md")):
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
