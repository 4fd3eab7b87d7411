"""Seeded random DAG plans: which states to send, in which waves, with every kind of reference and placement.

It runs nothing and expects nothing; generated lengths are known in advance because end-of-text is ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import get_args

from anabranch.wire import Explicit, GenerateRequest, Piece, Policy, Ref, Sampling, TextPiece, TokensPiece

from .brute import Node, look_all, selected

Tokenize = Callable[[str], list[int]]

LIMIT = 2000
"""Every position of a plan is below this."""

PHRASES = (
    "The river splits here.",
    "In short,",
    " and then",
    "Answer:",
    "Yes.",
    "List three reasons why",
    "She opened the door and",
    "def add(a, b):\n    return",
    "1, 2, 3, 4,",
    "To sum up both reports:",
    "The capital of France is",
    "However, the second witness said",
)
TEXT = """A river that leaves its main channel and joins it again further down is called an anabranch. Between the two
arms lies an island, sometimes only a bar of sand, sometimes a district with villages of its own. Engineers who plan a
bridge must measure both arms, because the discharge moves from one to the other within a few years. In the dry season
the smaller arm may stop flowing altogether, and fishermen walk across. When the rains return, the water takes the
shortest way, and the map has to be drawn again. Three teams worked on the survey last spring. The first counted the
fields on the left bank; the second took samples every morning at seven; the third wrote down what people remembered of
the flood of 1974. Their reports do not agree on every point, yet each of them is useful, and nobody had to repeat the
work of the others. The final report quotes all three and adds only a short conclusion at the end."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One request, and the node it will become: the generated tokens in `node` are placeholders of the right number."""

    node: Node
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests sent together (one that names another of the same wave goes out once that one is running), and the
    states that the client lets go of when all of them are done."""

    states: tuple[Planned, ...]
    release: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    waves: tuple[Wave, ...]

    @property
    def states(self) -> tuple[Planned, ...]:
        return tuple(state for wave in self.waves for state in wave.states)


@dataclass(slots=True)
class _Draw:
    """One run of the generator: the dice, the text to cut from, and the states so far."""

    seed: int
    rng: Random
    tokenize: Tokenize
    nonce: str
    corpus: list[int] = field(default_factory=list)
    states: list[Planned] = field(default_factory=list)

    def state(self, parents: list[Node]) -> Planned:
        """The next state; it may reference `parents`. Drawn again until all its positions are below LIMIT."""
        rng, index = self.rng, len(self.states)
        name = blake2b(f"{self.nonce}/{self.seed}/{index}".encode(), digest_size=16).hexdigest()
        pieces, tokens = self._input()
        generated = (0,) * rng.choice((0, 0, 1, 2, 3, 4, 6, 8))
        while True:
            root = not parents or rng.random() < 0.08
            refs = () if root else self._refs(parents)
            refs, place = self._place(refs, parents)
            node = Node(name, refs, place, tokens, generated, name=f"seed {self.seed} state {index}")
            view = look_all([*(planned.node for planned in self.states), node])[name]
            if max([view.start + len(node.own), *view.visible.values()]) < LIMIT:
                break
        sampling = Sampling(max_tokens=len(generated), temperature=0.0, ignore_eos=True, logprobs=True, top_logprobs=5)
        self.states.append(
            Planned(node, GenerateRequest(id=name, refs=refs, place=place, input=pieces, sampling=sampling))
        )
        return self.states[-1]

    def _input(self) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
        """Input pieces and the tokens they stand for: at least one, now and then more than a prefill chunk."""
        rng = self.rng
        if self.states and rng.random() < 0.1:  # equal text, other token instances
            again = rng.choice(self.states)
            return again.request.input, again.node.input
        if rng.random() < 0.2:
            text = rng.choice(PHRASES)
            return (TextPiece(text=text),), tuple(self.tokenize(text))
        n = rng.randint(40, 90) if rng.random() < 0.12 else rng.randint(1, 12)
        at = rng.randrange(len(self.corpus) - n)
        tokens = tuple(self.corpus[at : at + n])
        cut = rng.randint(0, n) if rng.random() < 0.3 else n
        return tuple(TokensPiece(tokens=part) for part in (tokens[:cut], tokens[cut:]) if part), tokens

    def _refs(self, parents: list[Node]) -> tuple[Ref, ...]:
        rng, refs = self.rng, []
        for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
            parent = self._pick(parents, refs[-1].id if refs else None)
            n, propagate = len(parent.own), rng.random() > 0.2
            match rng.choice(("inherit", "inherit", "upto", "span", "span", "default")):
                case "inherit":
                    refs.append(Ref(kind="inherit", id=parent.id, propagate=propagate))
                case "upto":
                    upto = rng.choice((0, n, rng.randint(0, n), rng.randint(0, n)))
                    refs.append(Ref(kind="inherit", id=parent.id, upto=upto, propagate=propagate))
                case "span":
                    begin = rng.randint(0, n)
                    end = begin if rng.random() < 0.15 else rng.randint(begin, n)
                    refs.append(Ref(kind="artifact", id=parent.id, span=(begin, end), propagate=propagate))
                case _:
                    refs.append(Ref(kind="artifact", id=parent.id, propagate=propagate))
        return tuple(refs)

    def _pick(self, parents: list[Node], last: str | None) -> Node:
        """Often the last one again, or one that the last one saw; else recent states, so that DAGs get deep, or any."""
        rng, by_id = self.rng, {node.id: node for node in parents}
        kin = [ref.id for ref in by_id[last].refs if ref.id in by_id] if last else []
        luck = rng.random()
        if last and luck < 0.2:
            return by_id[last]
        if kin and luck < 0.5:
            return by_id[rng.choice(kin)]
        return rng.choice(parents[-3:] if rng.random() < 0.6 else parents)

    def _place(self, refs: tuple[Ref, ...], parents: list[Node]) -> tuple[tuple[Ref, ...], Policy | Explicit | None]:
        """A placement, and the references with the bases that belong to it."""
        rng = self.rng
        place = rng.choice((None, None, None, "concat", "explicit", "explicit", *get_args(Policy)))
        if place != "explicit":
            return refs, place
        nodes = [planned.node for planned in self.states]
        views, by_id = look_all(nodes), {node.id: node for node in parents}
        based, largest = [], 0
        for ref in refs:
            seen = selected(ref, by_id[ref.id], views[ref.id]).values()
            base = None
            if rng.random() < 0.65:
                near = max(0, min(seen, default=0) + rng.randint(-40, 40))
                base = rng.choice((near, rng.randint(0, 600)))
            largest = max([largest, base or 0, *seen])
            based.append(ref.model_copy(update={"base": base}))
        start = rng.choice((None, None, rng.randint(0, largest), rng.randint(0, largest + 300)))
        return tuple(based), Explicit(start=start)


def plan(seed: int, tokenize: Tokenize, nonce: str = "") -> Plan:
    """The plan of one seed: 3 to 12 states. `nonce` only makes the ids differ, for a server that has seen the seed."""
    draw = _Draw(seed, Random(seed), tokenize, nonce, tokenize(TEXT))
    rng, waves, done = draw.rng, [], []
    total = rng.randint(3, 12)
    while len(draw.states) < total:
        wave: list[Planned] = []
        for _ in range(min(rng.choice((1, 1, 2, 3, 4)), total - len(draw.states))):
            early = [planned.node for planned in wave] if rng.random() < 0.25 else []
            wave.append(draw.state(done + early))
        done += [planned.node for planned in wave]
        waves.append(wave)
    return Plan(seed, tuple(_with_releases(waves, rng)))


def _with_releases(waves: list[list[Planned]], rng: Random) -> list[Wave]:
    """Let some states go as soon as no later request names them, though descendants still see their tokens."""
    result: list[Wave] = []
    held: list[str] = []
    for i, wave in enumerate(waves[:-1]):
        held += [state.node.id for state in wave]
        named = {ref.id for later in waves[i + 1 :] for state in later for ref in state.node.refs}
        release = [name for name in held if name not in named and rng.random() < 0.4]
        held = [name for name in held if name not in release]
        result.append(Wave(tuple(wave), tuple(release)))
    return [*result, Wave(tuple(waves[-1]))]
