"""The oracle for any architecture: against the hand-written Llama, and against the library where that can tell.

Its numbers are of tiny models (tests/models/tiny.py), not of a served one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import tiny

from .brute import sight
from .library import LibraryModel
from .llama import Llama, Sight
from .test_llama import gap, moved, theirs, undisturbed


def eager(name: str, **more: Any) -> Any:
    """The library's model as it comes, in fp64."""
    model = tiny.model(name, **more).double()
    model.set_attn_implementation("eager")
    return model


def as_one_consumer_sees_it(model: Any, tokens: Tensor, what: Sight) -> Tensor:
    """The library, run once for each row of positions; valid for one layer, whose keys do not depend on what they saw.

    Every consumer gets a forward of its own in which each key is at its position for that consumer.
    """
    out = torch.empty(len(tokens), model.config.vocab_size, dtype=torch.float64)
    for row, positions in enumerate(what.rows):
        mine = what.row_of == row
        seen = Sight(what.mask, positions[None], torch.zeros_like(what.row_of))
        out[mine] = theirs(model, tokens, seen)[mine]
    return out


def test_agrees_with_the_hand_written_llama_where_keys_move():
    tokens, what = sight(moved())
    by_hand = Llama.of(tiny.model("llama").double()).logprobs(tokens, what)
    library = LibraryModel.of(tiny.model("llama").double())
    assert gap(library.logprobs(tokens, what), by_hand) < 5e-5
    native = what.positions.diagonal()
    unmoved = Sight(what.mask, native.expand_as(what.rows), what.row_of)
    assert gap(library.logprobs(tokens, unmoved), by_hand) > 0.1


@pytest.mark.parametrize("name", sorted(tiny.SUPPORTED))
def test_agrees_with_the_library_where_nothing_is_moved(name: str):
    tokens, what = sight(undisturbed())
    got = LibraryModel.of(tiny.model(name).double()).logprobs(tokens, what)
    assert gap(got, theirs(eager(name), tokens, what)) < 5e-5


@pytest.mark.parametrize("name", sorted(tiny.SUPPORTED))
def test_a_moved_key_is_one_that_the_library_puts_there(name: str):
    tokens, what = sight(moved())
    got = LibraryModel.of(tiny.model(name, num_hidden_layers=1).double()).logprobs(tokens, what)
    one_layer = eager(name, num_hidden_layers=1)
    assert gap(got, as_one_consumer_sees_it(one_layer, tokens, what)) < 5e-5
    assert gap(got, theirs(one_layer, tokens, what)) > 0.1, "this DAG was meant to move keys"
