"""What a DAG of states means on the real engine: reuse, order, ends of generation. Values against unsplit requests.

The definition as a whole is held by tests/oracle; here are the single promises that users rely on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from anabranch import wire
from tests.engine.api import PATH, artifact, body, cancel, error, inherit, ok, send, together
from tests.serving import Served

pytestmark = pytest.mark.engine

STORY = "The story begins in a small village by the sea, where"
EVENT: TypeAdapter[Any] = TypeAdapter(wire.Event)  # pyright: ignore[reportArgumentType]
COUNT = "One, two, three, four, five,"


def test_continuing_by_inherit_equals_one_unsplit_request(served: Served):
    first, second = "Once upon a time there was", " a king who loved"
    lp = {"logprobs": True, "top_logprobs": 3}
    whole = ok(served, text=first + second, n=8, sampling=lp)
    root = ok(served, text=first)
    child = ok(served, [inherit(root.id)], second, 8, sampling=lp)
    assert child.tokens == whole.tokens
    assert whole.logprobs and child.logprobs
    assert [t.logprob for t in child.logprobs] == pytest.approx([t.logprob for t in whole.logprobs], abs=2e-4)
    assert child.usage.model_dump() == {
        "context_tokens": root.usage.computed_tokens,
        "reused_tokens": root.usage.computed_tokens,
        "computed_tokens": whole.usage.computed_tokens - root.usage.computed_tokens,
        "generated_tokens": 8,
    }


def test_the_last_generated_token_is_part_of_what_a_child_sees(served: Served):
    whole = ok(served, text=STORY, n=10)
    part = ok(served, text=STORY, n=6)
    child = ok(served, [inherit(part.id)], whole.tokens[6:7], 3)
    assert part.tokens + whole.tokens[6:7] + child.tokens == whole.tokens


def test_rewind_at_every_token_equals_never_having_gone_further(stepped: Served):
    tokens = list(range(300, 306))
    state = ok(stepped, text=tokens)
    for k in range(len(tokens) + 1):
        rewound = ok(stepped, [inherit(state.id, upto=k)], [400, 401], 2)
        assert rewound.tokens == ok(stepped, text=[*tokens[:k], 400, 401], n=2).tokens, f"at {k}"
        assert rewound.usage.context_tokens == k


def test_a_join_computes_its_own_input_only(served: Served):
    """vllm#6078: A+B, A+C, A+D and then A+B+C+D, without computing anything again."""
    a = ok(served, text=STORY)
    b, c, d = together(served, [body([inherit(a.id)], text, 3) for text in (" Alice", " Bob", " Carol said that")])
    joined = ok(served, [inherit(x.id) for x in (b, c, d)], [500, 501], 3)
    own = sum(x.usage.computed_tokens + x.usage.generated_tokens for x in (a, b, c, d))
    assert joined.usage.context_tokens == joined.usage.reused_tokens == own
    assert joined.usage.computed_tokens == 2


def test_eight_forks_at_once_compute_the_parent_once(served: Served):
    root = ok(served, text=list(range(300, 340)))
    children = together(served, [body([inherit(root.id)], [400 + i], 2) for i in range(8)])
    assert [child.usage.computed_tokens for child in children] == [1] * 8
    assert {child.usage.reused_tokens for child in children} == {40}
    alone = ok(served, [inherit(root.id)], [403], 2)
    assert children[3].tokens == alone.tokens


def test_long_input_over_a_join_is_prefilled_in_chunks(overlapped: Served):
    """sglang#2255: join 3 parents, then an input of several chunks (the server's are 16 tokens)."""
    parts = together(overlapped, [body(text=list(range(300 + i, 340, 3))) for i in range(3)])
    refs = [inherit(part.id) for part in parts]
    tokens = list(range(1000, 1070))
    whole = ok(overlapped, refs, tokens, 3, place="concat")
    head = ok(overlapped, refs, tokens[:7], place="concat")
    assert ok(overlapped, [inherit(head.id)], tokens[7:], 3).tokens == whole.tokens


def test_a_child_waits_for_a_parent_that_still_runs(served: Served):
    parent = body(text=STORY, n=12)
    child = body([inherit(parent["id"])], " and", 2)
    grandchild = body([inherit(child["id"])], " so", 2)
    with ThreadPoolExecutor(3) as pool:
        answers = [answer.result() for answer in _staggered(served, pool, [parent, child, grandchild])]
    usages = [wire.GenerateResponse.model_validate_json(answer.content).usage for answer in answers]
    assert usages[1].context_tokens == usages[0].computed_tokens + 12
    assert usages[2].context_tokens == usages[1].context_tokens + 3


def test_a_child_of_a_failed_parent_fails(served: Served):
    parent = body(text=STORY, n=4000)
    child = body([inherit(parent["id"])], " and", 2)
    with ThreadPoolExecutor(2) as pool:
        answers = _staggered(served, pool, [parent, child])
        assert cancel(served, parent["id"]).status_code == 204
        assert answers[0].result().json()["finish_reason"] == "cancelled"
        assert error(answers[1].result()).code == "state_not_found"


def test_releasing_a_parent_frees_nothing_that_a_child_sees(served: Served):
    root = ok(served, text=STORY)
    child = ok(served, [inherit(root.id)], " and", 2)
    before = ok(served, [inherit(child.id)], " then", 4)
    assert served.delete(f"/anabranch/v1/states/{root.id}").status_code == 204
    after = ok(served, [inherit(child.id)], " then", 4)
    assert after.tokens == before.tokens
    assert error(send(served, **body([inherit(root.id)], "x", 1))).code == "state_released"


def test_a_stop_string_is_not_part_of_the_state(served: Served):
    plain = ok(served, text=COUNT, n=8)
    stop = plain.text.split()[1]
    stopped = ok(served, text=COUNT, n=8, sampling={"stop": [stop]})
    assert stopped.finish_reason == "stop"
    assert stopped.text == plain.text.partition(stop)[0]
    assert 0 < len(stopped.tokens) < len(plain.tokens)
    assert stopped.tokens == plain.tokens[: len(stopped.tokens)]
    assert served.get(f"/anabranch/v1/states/{stopped.id}").json()["generated_tokens"] == len(stopped.tokens)


def test_a_stop_token_is_not_part_of_the_state(served: Served):
    plain = ok(served, text=COUNT, n=8)
    sampling = {"stop_token_ids": [plain.tokens[5]], "ignore_eos": False}
    stopped = ok(served, text=COUNT, n=8, sampling=sampling)
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == plain.tokens[: plain.tokens.index(plain.tokens[5])]
    child = ok(served, [inherit(stopped.id)], [400], 1)
    assert child.usage.context_tokens == stopped.usage.computed_tokens + len(stopped.tokens)


def test_a_stop_on_the_last_allowed_token_is_a_stop(served: Served):
    plain = ok(served, text=COUNT, n=4)
    token = {"stop_token_ids": [plain.tokens[3]], "ignore_eos": False}
    assert plain.tokens.index(plain.tokens[3]) == 3 or len(set(plain.tokens)) < 4
    by_token = ok(served, text=COUNT, n=plain.tokens.index(plain.tokens[3]) + 1, sampling=token)
    assert by_token.finish_reason == "stop"
    assert by_token.tokens == plain.tokens[: plain.tokens.index(plain.tokens[3])]
    word = plain.text.split()[1]
    count = 1 + next(n for n in range(4) if word in _text(served, n + 1))
    by_text = ok(served, text=COUNT, n=count, sampling={"stop": [word]})
    assert (by_text.finish_reason, by_text.text) == ("stop", plain.text.partition(word)[0])
    assert served.get(f"/anabranch/v1/states/{by_text.id}").json()["generated_tokens"] < count


def test_a_child_whose_parent_waits_beside_it_finds_it(served: Served):
    """Two requests end in one step; a child of one, accepted before its other parent, becomes ready with it."""
    p, q, r = (body(text=list(range(300, 310)), n=n) for n in (4, 24, 24))
    a = body([inherit(p["id"]), inherit(r["id"])], [400], 1)
    b = body([inherit(q["id"]), inherit(a["id"])], [401], 1)
    with ThreadPoolExecutor(5) as pool:
        first = [pool.submit(send, served, **one) for one in (q, r, p)]
        _until(lambda: all(served.get(f"/anabranch/v1/states/{x['id']}").status_code == 200 for x in (p, q, r)))
        later = [pool.submit(send, served, **a)]
        _until(lambda: served.get(f"/anabranch/v1/states/{a['id']}").status_code == 200)
        later.append(pool.submit(send, served, **b))
        assert [future.result().status_code for future in (*first, *later)] == [200] * 5


def test_a_state_that_is_not_kept_leaves_nothing(served: Served):
    answer = ok(served, text=STORY, n=3, keep=False)
    assert not answer.kept
    assert answer.usage.generated_tokens == 3
    assert served.stats()["states"] == 0
    assert error(send(served, **body([inherit(answer.id)], "x", 1))).code == "state_released"


def test_an_artifact_is_what_was_generated_and_nothing_else(served: Served):
    source = ok(served, text=STORY, n=5)
    answer = ok(served, [artifact(source.id)], " and", 2)
    assert answer.usage.context_tokens == 5
    plan = served.post("/anabranch/v1/explain", id=answer.id).json()
    own = source.usage.computed_tokens
    assert [(i["state"], i["start"], i["stop"]) for i in plan["intervals"]] == [(source.id, own, own + 5)]
    assert plan["start"] == own + 5


def test_a_grammar_ends_in_a_sealed_state(served: Served):
    answer = ok(served, text="The number is ", n=10, sampling={"regex": "[0-9]{3}", "ignore_eos": False})
    assert answer.text.isdigit()
    assert len(answer.text) == 3
    child = ok(served, [inherit(answer.id)], " and", 1)
    assert child.usage.context_tokens == answer.usage.computed_tokens + len(answer.tokens)


def test_a_stream_says_what_the_whole_answer_says(served: Served):
    whole = ok(served, text=STORY, n=6)
    request = {**body(text=STORY, n=6), "stream": True}
    with httpx.stream("POST", served.url + PATH, json=request, timeout=60) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = [EVENT.validate_json(line.removeprefix("data: ")) for line in stream.iter_lines() if line]
    *deltas, final = events
    assert final.type == "final"
    assert "".join(delta.text for delta in deltas) == final.response.text == whole.text
    assert sum((delta.tokens for delta in deltas), ()) == final.response.tokens == whole.tokens


def test_dropping_a_stream_ends_the_request(served: Served):
    request = {**body(text=STORY, n=4000), "stream": True}
    with httpx.stream("POST", served.url + PATH, json=request, timeout=60) as stream:
        next(stream.iter_lines())
    _until(lambda: served.stats()["running"] == 0, seconds=30)
    assert served.get(f"/anabranch/v1/states/{request['id']}").status_code == 404


@pytest.mark.parametrize("how", ["waiting for a parent", "running"])
def test_cancelling_leaves_no_trace(served: Served, how: str):
    parent = body(text=STORY, n=4000)
    child = body([inherit(parent["id"])], " and", 2)
    with ThreadPoolExecutor(2) as pool:
        answers = _staggered(served, pool, [parent, child])
        for one in (child, parent) if how == "waiting for a parent" else (parent, child):
            cancel(served, one["id"])
        ends = [answer.result().json() for answer in answers]
        assert [end["finish_reason"] for end in ends if "error" not in end] == ["cancelled"] * (
            2 - ("error" in ends[1])
        )
    stats = served.stats()
    assert (stats["running"], stats["waiting"], stats["held_tokens"]) == (0, 0, 0)


def test_an_unmade_context_can_be_explained(served: Served):
    a, b = ok(served, text=list(range(300, 310))), ok(served, text=list(range(310, 316)))
    spec = {"refs": [inherit(a.id), inherit(b.id)], "place": "concat"}
    plan = served.post("/anabranch/v1/explain", spec=spec).json()
    assert [(i["native"], i["effective"]) for i in plan["intervals"]] == [(0, 0), (0, 10)]
    assert (plan["start"], plan["context_tokens"]) == (16, 16)


def _text(served: Served, n: int) -> str:
    return ok(served, text=COUNT, n=n).text


def _staggered(served: Served, pool: ThreadPoolExecutor, chain: Sequence[dict[str, Any]]) -> list[Any]:
    """Send a parent, its child, its grandchild: each while the one before is accepted and unfinished."""
    futures = []
    for i, one in enumerate(chain):
        futures.append(pool.submit(send, served, **one))
        if i == 0:
            _until(lambda: served.get(f"/anabranch/v1/states/{chain[0]['id']}").status_code == 200)
        else:
            _until(lambda: served.stats()["waiting"] >= i or futures[0].done())  # noqa: B023
    return futures


def _until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)
