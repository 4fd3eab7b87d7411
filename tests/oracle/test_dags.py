"""The plans: valid, repeatable, within the limits, and between them covering every kind of case."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import get_args

from anabranch.wire import Explicit, Policy, TextPiece

from . import tiny
from .brute import look_all, selected
from .dags import LIMIT, Plan, plan

SEEDS = range(64)


def plans() -> list[Plan]:
    return [plan(seed, tiny.tokenize) for seed in SEEDS]


def test_a_seed_is_one_plan_and_a_nonce_changes_only_ids():
    one, again, other = plan(5, tiny.tokenize), plan(5, tiny.tokenize), plan(5, tiny.tokenize, nonce="x")
    assert one == again
    assert [s.node.input for s in one.states] == [s.node.input for s in other.states]
    assert not {s.node.id for s in one.states} & {s.node.id for s in other.states}


def test_every_plan_is_within_its_limits():
    for todo in plans():
        nodes = [state.node for state in todo.states]
        assert 3 <= len(nodes) <= 12
        for view, node in zip(look_all(nodes).values(), nodes, strict=True):
            assert node.input and len(node.generated) <= 8 and len(node.refs) <= 4
            assert max([view.start + len(node.own), *view.visible.values()]) < LIMIT
        gone: set[str] = set()
        for wave in todo.waves:
            assert not gone & {ref.id for state in wave.states for ref in state.node.refs}
            gone |= set(wave.release)


def test_the_seeds_cover_every_kind_of_case():
    seen: Counter[str] = Counter()
    for todo in plans():
        nodes = [state.node for state in todo.states]
        views, by_id = look_all(nodes), {node.id: node for node in nodes}
        for wave in todo.waves:
            here = {state.node.id for state in wave.states}
            seen["several generate at once"] += sum(bool(state.node.generated) for state in wave.states) > 1
            seen["early child"] += sum(ref.id in here for state in wave.states for ref in state.node.refs)
            seen["early release"] += len(wave.release)
        for state in todo.states:
            node, view = state.node, views[state.node.id]
            for ref in node.refs:
                n, (a, b) = len(by_id[ref.id].own), ref.span or (-1, -1)
                seen[f"{ref.kind}, propagate={ref.propagate}"] += 1
                seen["upto 0"] += ref.upto == 0
                seen["upto n"] += ref.upto == n
                seen["rewind"] += ref.upto is not None and 0 < ref.upto < n
                seen["empty span"] += ref.span is not None and a == b
                seen["span"] += a < b
                seen["default span"] += ref.kind == "artifact" and ref.span is None
            choices = [selected(ref, by_id[ref.id], views[ref.id]) for ref in node.refs]
            times = Counter(one for choice in choices for one in choice)
            seen["shared and private"] += {1, 2} <= {*times.values()}
            seen["one instance at two positions"] += any(
                a[one] != b[one] for a, b in combinations(choices, 2) for one in a.keys() & b.keys()
            )
            largest = max(view.visible.values(), default=-1)
            seen["root"] += not node.refs
            seen[f"{min(len(node.refs), 4)} references"] += 1
            seen["same parent twice"] += len({ref.id for ref in node.refs}) < len(node.refs)
            seen["start below"] += view.start <= largest
            seen["start far above"] += view.start > largest + 1
            seen["nothing visible"] += bool(node.refs) and not view.visible
            seen["hidden from descendants"] += bool(set(view.visible) - set(view.full))
            seen["chunked prefill"] += len(node.input) >= 40
            seen["text"] += any(isinstance(piece, TextPiece) for piece in state.request.input)
            seen["no generation"] += not node.generated
            placed = "explicit" if isinstance(node.place, Explicit) else str(node.place)
            seen[f"{placed} with {'several' if len(node.refs) > 1 else 'one'}"] += bool(node.refs)
            for (u, i), at in view.visible.items():
                delta = at - views[u].start - i
                seen["delta below 0"] += delta < 0
                seen["delta above 0"] += delta > 0
    print(seen)
    assert len(seen) == 35 + 2 * len(get_args(Policy)), (
        "a kind of reference, a number of references or a placement never came up"
    )
    assert min(seen.values()) >= 10, seen.most_common()[-5:]
