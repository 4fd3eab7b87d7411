"""The stress program, against the oracle's fake server: equal answers pass, and others are found.

The real servers are `scripts/stress-gpu`'s, or `python -m tests.soak.stress` anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.oracle import tiny
from tests.oracle.brute import Node
from tests.oracle.dags import plan
from tests.oracle.fake import Fake
from tests.oracle.run import run_plan

from .stress import Answers, differences

URL = "http://fake"
SEEDS = (1, 4, 13)


@pytest.fixture(scope="module")
async def answers() -> Answers:
    found: Answers = {}
    for seed in SEEDS:
        async with Fake().client() as client:
            found[seed] = await run_plan(URL, plan(seed, tiny.tokenize), client)
    return found


def changed(answers: Answers, seed: int, at: int, change: Callable[[Node], Node]) -> Answers:
    return answers | {seed: [change(node) if i == at else node for i, node in enumerate(answers[seed])]}


def generating(answers: Answers) -> tuple[int, int]:
    """A seed, and the first of its nodes that generates something and is seen by a later one."""
    for seed, nodes in answers.items():
        for i, node in enumerate(nodes):
            if node.generated and any(ref.id == node.id for later in nodes[i:] for ref in later.refs):
                return seed, i
    raise AssertionError("the seeds are badly chosen")


def test_equal_answers_are_equal(answers: Answers):
    wrong, counts = differences(answers, answers)
    assert not wrong
    assert counts["compared"] == sum(map(len, answers.values())) > 10


def test_ids_do_not_matter(answers: Answers):
    other = {seed: [replace(node, id=f"{node.id}x") for node in nodes] for seed, nodes in answers.items()}
    assert not differences(answers, other)[0]


def test_a_log_probability_that_is_off_is_found(answers: Answers):
    def off(node: Node) -> Node:
        return replace(node, top=({token: value - 0.5 for token, value in node.top[0].items()}, *node.top[1:]))

    wrong, _ = differences(answers, changed(answers, *generating(answers), off))
    assert len(wrong) == 1
    assert "0.50 apart" in wrong[0]


def other_token(node: Node, lead: float) -> Node:
    """The second likeliest was taken, which is `lead` less likely than the first in both runs."""
    (first, second, *_) = sorted(node.top[0], key=lambda token: -node.top[0][token])
    top = node.top[0] | {second: node.top[0][first] - lead}
    return replace(
        node, generated=(second if node.generated[0] == first else first, *node.generated[1:]), top=(top, *node.top[1:])
    )


@pytest.mark.parametrize(("lead", "found"), [(0.01, 0), (0.2, 0), (0.3, 1), (3.0, 1)])
def test_another_token_is_right_only_if_it_is_as_likely(answers: Answers, lead: float, found: int):
    seed, at = generating(answers)

    def tied(node: Node) -> Node:
        return replace(other_token(node, lead), generated=node.generated)

    one = changed(answers, seed, at, tied)
    other = changed(answers, seed, at, lambda node: other_token(node, lead))
    wrong, counts = differences(one, other)
    assert len(wrong) == found
    assert counts["of two minds"] == 1 - found
    assert counts["not comparable"] >= 1, "what sees the other token is left out"


def test_lists_without_anything_in_common_are_found(answers: Answers):
    def elsewhere(node: Node) -> Node:
        return replace(node, top=({token + 1000: value for token, value in node.top[0].items()}, *node.top[1:]))

    assert "in common" in differences(answers, changed(answers, *generating(answers), elsewhere))[0][0]
