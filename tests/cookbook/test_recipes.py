"""The recipes against a fake server: the graph that they make, what is reused, and that they release what they made.

The text is made up; whether a real model answers well is for scripts/demo to show.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

import cookbook
from anabranch import AsyncClient
from anabranch.testing import FakeServer
from cookbook import hello_fork, map_reduce

RECIPES = [module.name for module in pkgutil.iter_modules(cookbook.__path__)]


async def test_hello_fork_joins_two_sides_that_do_not_see_each_other() -> None:
    server = FakeServer(reply=lambda seen: " It is cheap." if seen.endswith("for the tram.") else " It is dear.")
    async with server.client() as client:
        debate = await hello_fork.run(client)
        pro, con = await debate.pro.state.explain(), await debate.con.state.explain()
        verdict = await debate.verdict.state.explain()
    assert (debate.pro.text, debate.con.text) == (" It is cheap.", " It is dear.")
    root = {interval.state for interval in pro.intervals}
    assert {interval.state for interval in con.intervals} == root
    assert {interval.state for interval in verdict.intervals} == {*root, debate.pro.state.id, debate.con.state.id}
    assert debate.verdict.usage.reused_tokens == verdict.context_tokens
    question = len(hello_fork.VERDICT.split())
    assert debate.verdict.usage.computed_tokens == question + 1  # the role is a word, too


async def test_map_reduce_reads_every_text_once() -> None:
    texts = map_reduce.read_texts()
    server = FakeServer(reply=" A text.")
    async with server.client() as client:
        digest = await map_reduce.run(client, texts)
        seen = await digest.answer.state.explain()
    assert list(digest.summaries) == list(texts)
    mapped = {result.state.id for result in digest.summaries.values()}
    assert mapped < {interval.state for interval in seen.intervals}
    # One root, each text, one last question: had the last step read the texts, this would be twice as much.
    words = sum(len(text.split()) for text in texts.values())
    assert digest.answer.usage.computed_tokens < 20
    assert words < digest.computed_tokens < 1.2 * words
    assert digest.reused_tokens > words


def test_texts_are_long_enough_and_their_source_is_told() -> None:
    texts = map_reduce.read_texts()
    told = (map_reduce.TEXTS / "README.md").read_text()
    assert len(texts) >= 4
    for name, text in texts.items():
        assert 100 <= len(text.split()) <= 300, name
        assert text.isascii(), name
        assert f"`{name}.txt`" in told, name


@pytest.mark.parametrize("name", RECIPES)
async def test_a_recipe_prints_its_graph_and_leaves_nothing_behind(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = importlib.import_module(f"cookbook.{name}")
    server = FakeServer(reply=" So it is.")
    monkeypatch.setattr(recipe, "AsyncClient", server.client)
    await recipe.main()
    printed = capsys.readouterr().out
    assert "inherit" in printed
    assert "So it is." in printed
    assert "reused" in printed
    async with server.client() as client:
        assert await client.states() == ()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_short(name: str) -> None:
    source = Path(cookbook.__path__[0], f"{name}.py").read_text()
    assert source.count("\n") <= 120
    assert issubclass(AsyncClient, object)
