"""Pages of 16 and of 64 slots on the real engine: states whose ends, forks and spans fall anywhere in a page.

Page size 1 is every other test's. The conservation laws are checked in every step, by SGLang and by us.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from anabranch import wire
from anabranch_server.engine import startup
from anabranch_server.engine.versions import UnsupportedSGLang
from tests.engine.api import artifact, body, inherit, new_id, ok, together
from tests.engine.test_startup import ARGS
from tests.oracle.brute import Node, logprobs
from tests.oracle.dags import Plan, Planned, Wave
from tests.oracle.llama import Llama
from tests.oracle.run import compare, release_rest, run_plan
from tests.serving import Served

both = pytest.mark.parametrize("paged", [16, 64], indirect=True)
engine = pytest.mark.engine
SCORES = {"logprobs": True, "top_logprobs": 5}


@pytest.fixture(autouse=True)
def every_page_comes_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test all is released, and every page of the pool is free or SGLang's own cache's."""
    yield
    if "paged" not in request.fixturenames:
        return
    served: Served = request.getfixturevalue("paged")
    stats = served.release_all()
    assert served.process.poll() is None, f"the server died:\n{served.log[-4000:]}"
    assert stats["states"] == stats["held_tokens"] == stats["in_use_tokens"] == 0, stats
    assert stats["free_tokens"] + stats["evictable_tokens"] == stats["total_tokens"], stats


def size_of(served: Served) -> int:
    return served.get("/server_info").json()["page_size"]


def in_pages(tokens: int, size: int) -> int:
    return -(-tokens // size) * size


def words(n: int, seed: int = 0) -> list[int]:
    """Tokens that are bytes of the tiny model, none of them special."""
    return [(7 * i + 13 * seed + i * i % 11) % 250 for i in range(n)]


@cache
def llama(model_dir: str) -> Llama:
    torch.set_num_threads(1)
    return Llama.load(model_dir, torch.float64)


def planned(tokens: Sequence[int], *refs: wire.Ref, n: int = 0, **more: Any) -> Planned:
    """A request, and the node of the definition that it will be."""
    sampling = wire.Sampling(max_tokens=n, temperature=0.0, ignore_eos=True, logprobs=True, top_logprobs=5)
    pieces = (wire.TokensPiece(tokens=tuple(tokens)),)
    name = new_id()
    node = Node(name, refs, more.get("place"), tuple(tokens), (0,) * n, name=f"{len(tokens)} tokens after {refs}")
    return Planned(node, wire.GenerateRequest(id=name, refs=refs, input=pieces, sampling=sampling, **more))


async def hold_against_the_definition(served: Served, *waves: Sequence[Planned]) -> None:
    plan = Plan(0, tuple(Wave(tuple(wave)) for wave in waves))
    async with httpx.AsyncClient(timeout=300) as client:
        nodes = await run_plan(served.url, plan, client)
        await release_rest(served.url, plan, client)
    compare(nodes, logprobs(nodes, llama(served.model_dir)))


# ---------------------------------------------------------------- forks and spans


@engine
@both
def test_sglang_22393_fork_at_every_token_equals_never_having_gone_further(paged: Served):
    """sglang PR#22393: whatever the offset is within its page."""
    size = size_of(paged)
    tokens, question = words(2 * size + 3 if size == 16 else size + 3), [201, 202]
    state = ok(paged, text=tokens)
    ends = range(len(tokens) + 1)
    forks = together(paged, [body([inherit(state.id, upto=k)], question, 2, sampling=SCORES) for k in ends])
    unsplit = together(paged, [body(text=[*tokens[:k], *question], n=2, sampling=SCORES, keep=False) for k in ends])
    for k, fork, whole in zip(ends, forks, unsplit, strict=True):
        assert (fork.usage.context_tokens, fork.usage.computed_tokens) == (k, 2), f"at {k}"
        assert fork.tokens == whole.tokens, f"at {k}"
        assert fork.logprobs and whole.logprobs
        expected = [one.logprob for one in whole.logprobs]
        assert [one.logprob for one in fork.logprobs] == pytest.approx(expected, abs=2e-4), f"at {k}"
    stats = paged.stats()
    assert stats["held_tokens"] + stats["evicted_tokens"] == in_pages(len(tokens), size) + size * len(forks)


@engine
@both
async def test_spans_that_begin_and_end_inside_a_page_are_read_as_the_definition_says(paged: Served):
    size = size_of(paged)
    source = planned(words(2 * size + 5), n=3)
    spans = [(3, 9), (size - 1, size), (size - 1, size + 1), (size, size + 1), (5, 2 * size + 7), (size // 2, size + 3)]
    children = [
        planned([200 + i], wire.Ref(kind="artifact", id=source.node.id, span=span), n=3) for i, span in enumerate(spans)
    ]
    twice = [
        wire.Ref(kind="artifact", id=source.node.id, span=span) for span in ((2, 7), (size + 2, size + 4), (4, 12))
    ]
    joined = planned([210, 211], *twice, n=3, place="concat")
    both_ends = [wire.Ref(kind="inherit", id=child.node.id) for child in children[:3]]
    await hold_against_the_definition(paged, [source], [*children, joined], [planned([220], *both_ends, n=4)])


@engine
@both
def test_a_span_keeps_the_pages_that_it_touches_and_no_others(paged: Served):
    size = size_of(paged)
    state = ok(paged, text=words(3 * size + 1))
    assert paged.stats()["held_tokens"] == 4 * size
    child = ok(paged, [artifact(state.id, span=(size + 3, size + 5))], [200])
    paged.delete(f"/anabranch/v1/states/{state.id}")
    assert paged.stats()["held_tokens"] == 2 * size, "one of the parent's, and the child's own"
    assert ok(paged, [inherit(child.id)], [201], 1).usage.context_tokens == 3


# ---------------------------------------------------------------- whose page it is


@engine
@both
def test_children_write_nothing_into_the_last_page_of_their_parent(paged: Served):
    """Two at once, and a third that goes on from the middle of the page: afterwards the parent answers bit by bit the
    same."""
    size = size_of(paged)
    parent = ok(paged, text=words(size + 5))

    def answer() -> Any:
        return ok(paged, [inherit(parent.id)], [230, 231], 6, sampling=SCORES, keep=False).logprobs

    before = answer()
    refs = [inherit(parent.id), inherit(parent.id), inherit(parent.id, upto=size + 2)]
    children = together(paged, [body([ref], [240 + i], 2 * size) for i, ref in enumerate(refs)])
    assert answer() == before
    alone = ok(paged, [inherit(parent.id)], [241], 2 * size)
    assert alone.tokens == children[1].tokens
    assert paged.stats()["held_tokens"] == in_pages(size + 5, size) + 4 * in_pages(2 * size + 1, size)


@engine
@both
async def test_two_children_of_one_parent_and_their_join_are_as_the_definition_says(paged: Served):
    size = size_of(paged)
    parent = planned(words(size - 3), n=6)
    ref = wire.Ref(kind="inherit", id=parent.node.id)
    one, other = planned(words(5, 1), ref, n=size), planned(words(size, 2), ref, n=2)
    refs = [wire.Ref(kind="inherit", id=child.node.id) for child in (one, other)]
    await hold_against_the_definition(
        paged, [parent], [one, other], [planned([250], *refs, n=4), planned([251], *refs, n=4, place="concat")]
    )


@engine
@both
async def test_a_prefill_in_chunks_continues_its_own_page_wherever_its_context_ends(paged: Served):
    """sglang#2255. Chunks end where the whole sequence is at a page bound, which own tokens are not."""
    size = size_of(paged)
    parents = [planned(words(n, n)) for n in (size + 1, 7, 2 * size - 1)]
    refs = [wire.Ref(kind="inherit", id=parent.node.id) for parent in parents]
    long = [planned(words(3 * size + 2, k), *refs[:k], n=size + 2, place="concat") for k in (1, 2, 3)]
    await hold_against_the_definition(paged, parents, long)


@engine
@pytest.mark.parametrize("paged", [64], indirect=True)
async def test_a_retracted_request_starts_again_in_fresh_pages(paged: Served):
    parent = planned(words(70), n=2)
    ref = wire.Ref(kind="inherit", id=parent.node.id)
    before = paged.log.count("#retracted_reqs")
    await hold_against_the_definition(paged, [parent], [planned(words(3 + i, i), ref, n=70) for i in range(6)])
    assert paged.log.count("#retracted_reqs") > before


@engine
@both
def test_what_a_state_keeps_ends_at_its_stop_token_wherever_that_is_in_a_page(paged: Served):
    """The pages behind it are given back; the one that it is in is kept."""
    size = size_of(paged)
    for n in range(size - 4, size + 2):
        plain = ok(paged, text=words(n), n=6, keep=False).tokens
        stop = plain[4]
        kept = plain.index(stop)
        sampling = {"stop_token_ids": [stop], "ignore_eos": False}
        state = ok(paged, text=words(n), n=2 * size, sampling=sampling)
        assert (state.finish_reason, state.tokens) == ("stop", plain[:kept]), f"{n} tokens"
        assert paged.stats()["held_tokens"] == in_pages(n + kept, size), f"{n} tokens"
        assert (
            ok(paged, [inherit(state.id)], plain[kept : kept + 1], 1, keep=False).tokens == plain[kept + 1 : kept + 2]
        )
        paged.release_all()


# ---------------------------------------------------------------- a full pool


@engine
@both
def test_what_left_memory_is_computed_again_in_whole_pages(paged: Served):
    size = size_of(paged)
    total = paged.stats()["total_tokens"]
    parent = ok(paged, text=words(2 * size + 3))
    child = ok(paged, [artifact(parent.id, span=(size - 1, size + 2))], words(3), 5)
    paged.delete(f"/anabranch/v1/states/{parent.id}")
    before = ok(paged, [inherit(child.id)], [200], 4, sampling=SCORES, keep=False)
    assert before.usage.reused_tokens == before.usage.context_tokens == 11
    while not paged.stats()["evicted_tokens"]:
        together(paged, [body(text=words(total // 8, 3 + i)) for i in range(4)])
    again = ok(paged, [inherit(child.id)], [200], 4, sampling=SCORES, keep=False)
    assert again.tokens == before.tokens
    assert again.logprobs and before.logprobs
    expected = [one.logprob for one in before.logprobs]
    assert [one.logprob for one in again.logprobs] == pytest.approx(expected, abs=2e-4)
    assert again.usage.computed_tokens == 1 + 2 * size + 8, "the parent's two kept pages, and the child"


@engine
@both
def test_a_pool_full_of_half_empty_pages_is_filled_beyond_its_end_and_released(paged: Served):
    """One token over a page each: what fits is counted in pages, and nobody waits for ever."""
    size, total = size_of(paged), paged.stats()["total_tokens"]
    states = total // (2 * size) * 5 // 4
    for at in range(0, states, 20):
        together(paged, [body(text=words(size, at + i), n=1) for i in range(20)])
    stats = paged.stats()
    assert stats["states"] == states
    assert stats["held_tokens"] + stats["evicted_tokens"] == 2 * size * states
    assert stats["held_tokens"] + stats["free_tokens"] + stats["evictable_tokens"] == total
    assert stats["evicted_states"] >= states // 5
    assert paged.release_all()["held_tokens"] == 0
    assert ok(paged, text=words(total * 3 // 4), n=2).usage.computed_tokens == total * 3 // 4


@engine
@both
def test_plain_requests_keep_their_own_cache_of_whole_pages(paged: Served):
    size = size_of(paged)
    prompt = words(2 * size + 5, 9)
    plain = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}
    first = paged.post("/generate", **plain).json()
    state = ok(paged, text=prompt, n=4)
    second = paged.post("/generate", **plain).json()
    assert (first["meta_info"]["cached_tokens"], second["meta_info"]["cached_tokens"]) == (0, 2 * size)
    assert tuple(first["output_ids"]) == tuple(second["output_ids"]) == state.tokens


# ---------------------------------------------------------------- who may read pages


@pytest.mark.parametrize("where", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
def test_an_attention_backend_that_reads_whole_pages_is_refused_by_name(where: str):
    args = {**ARGS, "page_size": 16, "attention_backend": "triton"}
    for backend in ("torch_native", "triton", "flashinfer"):
        startup.refuse_flags(_with(args, where, backend))
    with pytest.raises(UnsupportedSGLang, match="--page-size 16 with the attention backend fa3"):
        startup.refuse_flags(_with(args, where, "fa3"))
    startup.refuse_flags(_with({**args, "page_size": 1}, where, "fa3"))


def _with(args: dict[str, Any], name: str, value: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**args, name: value})


@pytest.mark.parametrize("size", [1, 16, 64])
def test_no_request_that_the_context_limit_allows_is_cut_by_sglang(size: int):
    """Scheduler.init_req_max_new_tokens and tp_worker.get_worker_info, for every split into input and output."""
    pool = 10 * size + 40 * (size == 1)
    most = startup._max_context(10**6, pool, size)
    for n in range(1, most):
        asked = most - n
        assert asked <= pool - in_pages(n, size) - size - 1
        assert asked <= pool - 1 - n - 1
