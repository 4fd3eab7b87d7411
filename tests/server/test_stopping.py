"""How many generated tokens lie before a stop string; no request and no server."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch_server.stopping import tokens_before

FAST = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def cut(tokens: Sequence[str | bytes], stop: str) -> int:
    """Tokens are what they spell; bytes that are no character yet are spelled with the replacement character."""

    def decode(ids: Sequence[int]) -> str:
        spelled = [tokens[i] for i in ids]
        return b"".join(t.encode() if isinstance(t, str) else t for t in spelled).decode(errors="replace")

    return tokens_before(decode, range(len(tokens)), stop)


@pytest.mark.parametrize(
    ("tokens", "stop", "kept"),
    [
        (["Hello", " world", "\n", "\n"], "\n\n", 2),  # the stop is tokens of its own
        (["Hello", "\n\n", "more"], "\n\n", 1),  # what came after it goes too
        (["Hello", "END"], "END", 1),
        (["END"], "END", 0),
        (["E", "N", "D"], "END", 0),
        (["Hello", " woEN", "D"], "END", 1),  # the token in which it begins is not wholly before it
        (["Hello", "ENDing"], "END", 1),
        (["He", "llo. ", "x"], "o.", 1),
        (["a", "ENENDD"], "END", 1),
        (["a", "END", "b", "END"], "END", 1),  # the first one counts
        (["a", "a", "a", "ab"], "aab", 2),  # it begins in the middle of what looks like it
    ],
)
def test_what_lies_wholly_before_the_first_stop_is_kept(tokens: list[str], stop: str, kept: int):
    assert cut(tokens, stop) == kept


def test_without_a_stop_in_the_text_everything_is_kept():
    assert cut(["Hello", " EN"], "END") == 2
    assert cut([], "END") == 0
    assert cut(["", ""], "END") == 2


def test_a_token_that_spells_nothing_is_kept_before_the_stop_and_dropped_inside_or_after_it():
    assert cut(["a", "", "END", ""], "END") == 2
    assert cut(["", "END"], "END") == 1
    assert cut(["a", "E", "", "ND"], "END") == 1


def test_a_character_of_several_tokens_is_kept_whole_before_the_stop():
    smile = "\U0001f600".encode()
    assert cut(["a", smile[:1], smile[1:3], smile[3:], "END"], "END") == 4
    assert cut([smile[:2], smile[2:], "x", "END"], "END") == 3


def test_a_stop_of_several_bytes_is_dropped_with_its_first_byte():
    assert cut(["a", b"\xc3", b"\xa9", "b"], "\u00e9") == 1
    assert cut(["\u00e9", b"\xe2", b"\x80", b"\xa6"], "\u2026") == 1


def test_bytes_that_never_became_a_character_count_as_what_they_spell():
    assert cut(["a", b"\xe2", "END"], "END") == 2
    assert cut([b"\xf0\x9f", "x", b"\xff", "END", "z"], "END") == 3


@FAST
@given(st.lists(st.text(alphabet="ab", max_size=3), max_size=8), st.text(alphabet="ab", min_size=1, max_size=3))
def test_it_is_the_longest_prefix_that_ends_at_or_before_the_stop(tokens: list[str], stop: str):
    text = "".join(tokens)
    end = text.index(stop) if stop in text else len(text)
    assert cut(tokens, stop) == max(k for k in range(len(tokens) + 1) if len("".join(tokens[:k])) <= end)


@FAST
@given(st.text(alphabet="a\u00e9\u2026\U0001f600", max_size=6), st.data())
def test_no_cut_into_tokens_loses_a_character_or_keeps_a_byte_of_the_stop(before: str, data: st.DataObject):
    raw = (before + "|stop").encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1), max_size=6)))
    tokens = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    kept = b"".join(tokens[: cut(tokens, "|stop")])
    assert len(kept) == max(end for end in [0, *cuts] if end <= len(before.encode()))
