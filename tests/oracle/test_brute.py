"""The traversal against small DAGs worked out by hand, one rule of the definition each.

No model and no server.
"""

from __future__ import annotations

import pytest

from anabranch.wire import Explicit, Ref

from .brute import Node, View, look_all, sight

IDS = {letter: f"{ord(letter):032x}" for letter in "abcdvwx"}


def inherit(letter: str, upto: int | None = None, propagate: bool = True, base: int | None = None) -> Ref:
    return Ref(kind="inherit", id=IDS[letter], upto=upto, propagate=propagate, base=base)


def artifact(letter: str, a: int | None = None, b: int = 0, propagate: bool = True, base: int | None = None) -> Ref:
    span = None if a is None else (a, b)
    return Ref(kind="artifact", id=IDS[letter], span=span, propagate=propagate, base=base)


def node(letter: str, n: int, *refs: Ref, place=None, generated: int = 0) -> Node:
    """`n` own tokens, of which the last `generated` count as generated."""
    return Node(IDS[letter], refs, place, (7,) * (n - generated), (8,) * generated, name=letter)


def show(placed: dict[tuple[str, int], int]) -> str:
    """Like "a0@0 a1@1": token instances in order, each at its effective position."""
    letters = {name: letter for letter, name in IDS.items()}
    return " ".join(f"{letters[name]}{i}@{position}" for (name, i), position in placed.items())


def look(letter: str, *nodes: Node) -> View:
    return look_all(nodes)[IDS[letter]]


A = node("a", 3, generated=1)
B = node("b", 2, inherit("a"))  # at 3, 4
C = node("c", 4, inherit("a"), generated=2)  # at 3..6


def expect(view: View, visible: str, start: int, full: str | None = None) -> None:
    assert show(view.visible) == visible
    assert view.start == start
    if full is not None:
        assert show(view.full) == full


def test_a_root_sees_nothing_and_starts_at_0_or_where_told():
    expect(look("a", A), "", 0, "a0@0 a1@1 a2@2")
    expect(look("a", node("a", 2, place=Explicit(start=9))), "", 9, "a0@9 a1@10")
    for place in ("keep", "concat", "same_start", "right_aligned", Explicit()):
        expect(look("a", node("a", 1, place=place)), "", 0, "a0@0")


def test_inherit_continues_where_the_parent_ended():
    expect(look("b", A, B), "a0@0 a1@1 a2@2", 3, "a0@0 a1@1 a2@2 b0@3 b1@4")


@pytest.mark.parametrize(("upto", "own", "start"), [(0, "", 3), (1, " b0@3", 4), (2, " b0@3 b1@4", 5)])
def test_inherit_upto_rewinds(upto: int, own: str, start: int):
    expect(look("v", A, B, node("v", 1, inherit("b", upto))), f"a0@0 a1@1 a2@2{own}", start)


def test_one_inherit_starts_after_the_parent_even_below_the_largest_position():
    low = node("b", 2, inherit("a"), place=Explicit(start=0))
    for propagate in (True, False):
        child = node("v", 1, inherit("b", propagate=propagate))
        expect(look("v", A, low, child), "a0@0 a1@1 a2@2 b0@0 b1@1", 2)
    expect(look("v", A, low, node("v", 1, inherit("b", 1))), "a0@0 a1@1 a2@2 b0@0", 1)
    expect(look("v", A, low, node("v", 1, inherit("b", 1), place="keep")), "a0@0 a1@1 a2@2 b0@0", 3)
    expect(look("v", A, low, node("v", 1, inherit("b", 1), place=Explicit())), "a0@0 a1@1 a2@2 b0@0", 3)


def test_one_artifact_is_kept_and_starts_after_the_largest():
    expect(look("v", A, B, node("v", 1, artifact("b", 0, 1))), "b0@3", 4, "b0@3 v0@4")
    expect(look("v", A, node("v", 1, artifact("a"))), "a2@2", 3)
    expect(look("v", A, C, node("v", 1, artifact("c"))), "c2@5 c3@6", 7)
    expect(look("v", A, B, node("v", 1, artifact("b"))), "", 0)
    expect(look("v", A, B, node("v", 1, artifact("b", 1, 1))), "", 0)


def test_branches_keep_their_positions_and_the_longest_decides_the_start():
    view = look("v", A, B, C, node("v", 1, inherit("b"), inherit("c")))
    expect(view, "a0@0 a1@1 a2@2 b0@3 b1@4 c0@3 c1@4 c2@5 c3@6", 7)
    view = look("v", A, B, C, node("v", 1, inherit("c"), inherit("b")))
    expect(view, "a0@0 a1@1 a2@2 c0@3 c1@4 c2@5 c3@6 b0@3 b1@4", 7)


def test_each_instance_is_seen_once_and_the_first_occurrence_orders():
    refs = (artifact("a", 1, 3), artifact("a", 0, 2), inherit("a"), inherit("a", 1))
    expect(look("v", A, node("v", 1, *refs)), "a1@1 a2@2 a0@0", 3)


def test_equal_tokens_of_two_states_are_two_instances():
    expect(look("v", A, node("b", 3), node("v", 1, inherit("a", 1), inherit("b", 1))), "a0@0 b0@0", 1)


def test_a_reference_that_does_not_propagate_ends_with_its_state():
    v = node("v", 1, inherit("b", propagate=False), artifact("c", 0, 1))
    w = node("w", 1, inherit("v"))
    expect(look("v", A, B, C, v), "a0@0 a1@1 a2@2 b0@3 b1@4 c0@3", 5, "c0@3 v0@5")
    expect(look("w", A, B, C, v, w), "c0@3 v0@5", 6)


def test_an_instance_propagates_if_any_selecting_reference_does():
    v = node("v", 1, artifact("a", 0, 2, propagate=False), artifact("a", 1, 3))
    expect(look("v", A, v), "a0@0 a1@1 a2@2", 3, "a1@1 a2@2 v0@3")


def test_artifact_does_not_bring_what_the_state_saw():
    expect(look("w", A, B, node("v", 1, inherit("b")), node("w", 1, artifact("v", 0, 1))), "v0@5", 6)


def test_concat_lays_end_to_end_in_compiled_order():
    v = node("v", 2, inherit("c", 1), inherit("b"), artifact("c", 0, 3), place="concat")
    view = look("v", A, B, C, v)
    expect(view, "a0@0 a1@1 a2@2 c0@3 b0@4 b1@5 c1@6 c2@7", 8)
    w = node("w", 1, inherit("v"))
    expect(look("w", A, B, C, v, w), "a0@0 a1@1 a2@2 c0@3 b0@4 b1@5 c1@6 c2@7 v0@8 v1@9", 10)


def test_concat_counts_what_is_not_handed_on():
    v = node("v", 1, artifact("b", 0, 2, propagate=False), artifact("c", 2, 4), place="concat")
    expect(look("v", A, B, C, v), "b0@0 b1@1 c2@2 c3@3", 4, "c2@2 c3@3 v0@4")


def test_inherited_placements_are_the_parents_and_artifacts_are_native():
    v = node("v", 2, artifact("b", 0, 2), place=Explicit(start=20))
    moved = node("w", 1, inherit("v"), artifact("b", 0, 1, base=50), place=Explicit())
    expect(look("w", A, B, v, moved), "b0@3 b1@4 v0@20 v1@21", 22)
    v = node("v", 2, artifact("b", 0, 2, base=10), place=Explicit(start=20))
    expect(look("x", A, B, v, node("x", 1, inherit("v"), inherit("b"))), "b0@10 b1@11 v0@20 v1@21 a0@0 a1@1 a2@2", 22)
    expect(look("x", A, B, v, node("x", 1, inherit("b"), inherit("v"))), "a0@0 a1@1 a2@2 b0@3 b1@4 v0@20 v1@21", 22)


def test_a_base_moves_a_reference_rigidly_by_its_smallest_position():
    refs = (inherit("b", base=10), artifact("c", 1, 3, base=2), artifact("c", 3, 4))
    view = look("v", A, B, C, node("v", 1, *refs, place=Explicit()))
    expect(view, "a0@10 a1@11 a2@12 b0@13 b1@14 c1@2 c2@3 c3@6", 15)
    view = look("v", A, B, C, node("v", 1, *refs, place=Explicit(start=0)))
    assert view.start == 0


def test_a_base_of_0_is_a_base():
    expect(look("v", A, B, node("v", 1, artifact("b", 0, 2, base=0), place=Explicit())), "b0@0 b1@1", 2)


def test_a_base_is_measured_before_deduplication():
    """The second reference's smallest token, a0 at 0, is already seen; it still decides how far the rest moves."""
    view = look("v", A, B, node("v", 1, inherit("a"), inherit("b", base=100), place=Explicit()))
    expect(view, "a0@0 a1@1 a2@2 b0@103 b1@104", 105)


def test_the_smallest_position_need_not_be_the_first_token():
    v = node("v", 1, artifact("b", 0, 1), artifact("a", 0, 1))
    w = node("w", 1, inherit("v", base=10), place=Explicit())
    expect(look("w", A, B, v, w), "b0@13 a0@10 v0@14", 15)


def test_an_empty_reference_with_a_base_moves_nothing():
    view = look("v", A, node("v", 1, artifact("a", 1, 1, base=40), inherit("a"), place=Explicit()))
    expect(view, "a0@0 a1@1 a2@2", 3)


LINED_UP = ("same_start", "right_aligned")


def test_private_parts_begin_together_after_what_is_shared():
    """b0 and b1 sit at 3 and 4 already; d, which is a root, comes to the same place; a is seen by both b and c."""
    v = node("v", 1, inherit("b"), artifact("d", 0, 3), inherit("c"), place="same_start")
    expect(look("v", A, B, C, node("d", 3), v), "a0@0 a1@1 a2@2 b0@3 b1@4 d0@3 d1@4 d2@5 c0@3 c1@4 c2@5 c3@6", 7)


def test_private_parts_end_together_and_new_tokens_follow():
    v = node("v", 1, inherit("b"), artifact("d", 0, 3), inherit("c"), place="right_aligned")
    expect(look("v", A, B, C, node("d", 3), v), "a0@0 a1@1 a2@2 b0@5 b1@6 d0@4 d1@5 d2@6 c0@3 c1@4 c2@5 c3@6", 7)


def test_without_anything_shared_private_parts_begin_at_0():
    roots = node("a", 3), node("b", 2, place=Explicit(start=40))
    refs = inherit("a"), inherit("b")
    expect(look("v", *roots, node("v", 1, *refs, place="same_start")), "a0@0 a1@1 a2@2 b0@0 b1@1", 3)
    expect(look("v", *roots, node("v", 1, *refs, place="right_aligned")), "a0@0 a1@1 a2@2 b0@1 b1@2", 3)


def test_one_reference_has_no_shared_part_and_moves_as_a_whole_to_0():
    high = node("a", 3, place=Explicit(start=40))
    for place in LINED_UP:
        expect(look("v", high, node("v", 1, inherit("a", 2), place=place)), "a0@0 a1@1", 2)


def test_a_reference_that_is_listed_again_shares_nothing_with_itself():
    high = node("a", 3, place=Explicit(start=40))
    for place in LINED_UP:
        expect(look("v", high, node("v", 1, inherit("a"), inherit("a"), place=place)), "a0@0 a1@1 a2@2", 3)
        twice = node("v", 1, inherit("a"), inherit("a", propagate=False), place=place)
        expect(look("v", high, twice), "a0@40 a1@41 a2@42", 43)


def test_the_shared_part_stays_where_the_first_reference_has_it():
    v = node("v", 2, artifact("b", 0, 2, base=10), place=Explicit(start=20))
    for place in LINED_UP:
        view = look("x", A, B, v, node("x", 1, inherit("v"), inherit("b"), place=place))
        starts = {"same_start": "v0@12 v1@13 a0@12 a1@13 a2@14", "right_aligned": "v0@13 v1@14 a0@12 a1@13 a2@14"}
        expect(view, f"b0@10 b1@11 {starts[place]}", 15)
        view = look("x", A, B, v, node("x", 1, inherit("b"), inherit("v"), place=place))
        starts = {
            "same_start": "a0@5 a1@6 a2@7 b0@3 b1@4 v0@5 v1@6",
            "right_aligned": "a0@5 a1@6 a2@7 b0@3 b1@4 v0@6 v1@7",
        }
        expect(view, starts[place], 8)


def test_a_private_part_keeps_the_gaps_inside_it():
    """Its extent, not its number of tokens, decides where the others end."""
    gap = node("d", 1, inherit("c", 1), artifact("c", 3, 4))
    v = node("v", 1, inherit("d"), artifact("b", 0, 2), place="same_start")
    expect(look("v", A, B, C, gap, v), "a0@0 a1@1 a2@2 c0@3 c3@6 d0@7 b0@0 b1@1", 8)
    v = node("v", 1, inherit("d"), artifact("b", 0, 2), place="right_aligned")
    expect(look("v", A, B, C, gap, v), "a0@0 a1@1 a2@2 c0@3 c3@6 d0@7 b0@6 b1@7", 8)


def test_a_reference_whose_tokens_are_all_shared_has_nothing_to_move():
    v = node("v", 1, inherit("a"), inherit("b"), artifact("a", 1, 1), place="right_aligned")
    expect(look("v", A, B, v), "a0@0 a1@1 a2@2 b0@3 b1@4", 5)
    v = node("v", 1, inherit("a"), artifact("a", 0, 3), place="right_aligned")
    expect(look("v", A, v), "a0@0 a1@1 a2@2", 3)


def test_mask_and_positions_of_every_token():
    v = node("v", 2, artifact("a", 1, 2, base=5), place=Explicit())
    _, what = sight([node("a", 2), v])
    assert what.mask.tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, True, True, False],
        [False, True, True, True],
    ]
    places = what.positions.masked_fill(~what.mask, -1)
    assert places.tolist() == [[0, -1, -1, -1], [0, 1, -1, -1], [-1, 5, 6, -1], [-1, 5, 6, 7]]


@pytest.mark.parametrize("ref", [inherit("a", 4), artifact("a", 0, 4)])
def test_what_does_not_exist_cannot_be_selected(ref: Ref):
    with pytest.raises(AssertionError, match="of 3 own tokens"):
        look("v", A, node("v", 1, ref))
