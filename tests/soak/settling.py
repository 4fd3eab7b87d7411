"""What is checked whenever the server has come to rest: sums, who is there and who is not, and answers by brute force.

It carries out no random operations.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from random import Random

from torch import Tensor

from tests.oracle.brute import Node, logprobs
from tests.oracle.llama import Llama

from . import checks
from .actions import Actions
from .calls import Violation
from .drawing import Draw
from .operations import Operation
from .world import Known, lineage

REST_SECONDS = 60.0
LEASE_SLACK = 5.0
"""Seconds after its lease by which a state must have gone."""
FLUSHES = 0.3
"""Share of settlings that end with a flush; between other operations the server is hardly ever idle enough for one."""
PROBES = 5
"""Most states that are continued and computed again at one settling."""


@dataclass(slots=True)
class Settling:
    """`exact` and `rough` are the served model in fp64 and fp32."""

    actions: Actions
    exact: Llama
    rough: Llama

    async def rest(self) -> dict:
        """Wait until nothing runs; returns the stats, which must add up."""
        deadline = time.monotonic() + REST_SECONDS
        while (stats := await self.actions.calls.stats())["running"] or stats["waiting"] or stats["in_use_tokens"]:
            if time.monotonic() > deadline:
                raise Violation(f"no request of ours runs, but the server does not come to rest: {stats}")
            await asyncio.sleep(0.02)
        checks.sums(stats)
        return stats

    async def settle(self, operation: Operation) -> dict:
        """All checks; `operation` lends its dice and its ids. Returns the stats."""
        await self.rest()
        await self._who_is_there()
        await self._probe(operation)
        self._plain_answers()
        stats = await self.rest()
        if self.actions.judge.has("flush") and operation.dice().random() < FLUSHES:
            await self.actions.flush()
            await self._who_is_there()
            stats = await self.rest()
        return stats

    async def finish(self) -> dict:
        """Release everything, one by one or together; returns the stats of an empty server."""
        actions, world = self.actions, self.actions.world
        await self._leases_end()
        batch = actions.judge.has("release_batch")
        for key in actions.keys:
            ids = [known.id for known in world.states.values() if known.key == key]
            if batch and ids:
                await actions.calls.release_batch(ids, key)
            for state_id in () if batch else ids:
                await actions.calls.release(state_id, key)
        for known in [*world.states.values()]:
            world.remove(known, released=True)
        await self.rest()
        await self._who_is_there()
        await actions.calls.flush()
        stats = await self.rest()
        checks.baseline(stats)
        return stats

    async def _who_is_there(self) -> None:
        """The lists of states are what they must be. Also settles every doubt."""
        world = self.actions.world
        for key in self.actions.keys:
            began = time.monotonic()
            listed = await self.actions.calls.listed(key)
            for known in [one for one in world.states.values() if one.key == key]:
                if known.id in listed:
                    self._may_be_there(known, began)
                    known.ending = known.interrupted = False
                    if known.lease is None:
                        known.doubt_from = float("inf")
                    continue
                if known.sure:
                    raise Violation(f"{known.node.name} {known.id} is not listed, but it must be there")
                world.remove(known)
            for state_id in listed - world.states.keys():
                if state_id not in world.lost:
                    raise Violation(f"the state {state_id} is listed, but it was released or never made")
                await self.actions.calls.release(state_id, key)
        world.lost.clear()

    def _may_be_there(self, known: Known, now: float) -> None:
        if known.lease is not None and known.used + known.lease + LEASE_SLACK < now:
            raise Violation(
                f"{known.node.name} {known.id} is there {now - known.used:.1f} s after its last use, "
                f"with a lease of {known.lease} s"
            )

    async def _leases_end(self) -> None:
        """Wait until every short lease must be over."""
        leased = [one for one in self.actions.world.states.values() if one.lease is not None]
        over = max((one.used + (one.lease or 0) + LEASE_SLACK + 0.1 for one in leased), default=0.0)
        await asyncio.sleep(max(0.0, over - time.monotonic()))
        await self._who_is_there()
        if left := [one.id for one in leased if one.id in self.actions.world.states]:
            raise Violation(f"leases are over, but the states {left} are there")

    async def _probe(self, operation: Operation) -> None:
        """Continue some survivors, and compute what they say, and all that they came from, by brute force."""
        draw = Draw(operation, Random(f"probe {operation.seed}/{operation.index}"), self.actions.world, bool)
        survivors = [one for one in self.actions.world.states.values() if one.sure]
        for parent in draw.dice.sample(survivors, min(PROBES, len(survivors))):
            draw.key = parent.key
            probe = draw.probe(parent)
            outcome = await self.actions.compute(probe)
            if outcome == "ok":
                self.compare([one.node for one in lineage([probe])])
                await self.actions.give_up(probe)

    def compare(self, nodes: list[Node]) -> None:
        if not self.actions.judge.has("oracle"):
            return
        tally = self.actions.tally
        rough = partial(logprobs, nodes, self.rough)
        tally.worst = max(tally.worst, checks.answers(nodes, self._exactly(nodes), rough))
        tally.checked += 1

    def _exactly(self, nodes: list[Node]) -> dict[str, Tensor]:
        return logprobs(nodes, self.exact)

    def _plain_answers(self) -> None:
        while self.actions.plain_answers:
            prompt, tokens = self.actions.plain_answers.pop()
            self.compare([Node("plain", input=prompt, generated=tokens, name="plain request")])
