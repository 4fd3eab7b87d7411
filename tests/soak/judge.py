"""Decides whether an answer is one that the contract allows in what has happened around it, and books what follows.

It sends nothing. Where two requests race, every order of the two is allowed; where nothing races, only one answer is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from anabranch.wire import GenerateResponse
from tests.oracle.brute import look

from . import checks
from .calls import Answer, Violation
from .world import AFTERMATH, Known, World

GONE = frozenset({"state_released", "state_not_found"})


@dataclass(slots=True)
class Judge:
    """`has` says whether a kind of operation or a trait is switched on."""

    world: World
    has: Callable[[str], bool]

    async def generated(self, known: Known, answer: Answer) -> str:
        """Book the answer to a generate; returns the outcome in a word. Raises Violation."""
        try:
            if not answer.ok:
                for parent in known.parents:  # whose own answer says whether it was there
                    await parent.done.wait()
                self.world.remove(known)
                self._refused(known, answer)
                return answer.code
            reply = GenerateResponse.model_validate(answer.body)
            cut = known.interrupted or known.ending or self.world.sweeps.overlaps(known.started)
            checks.shape(known.node, known.asked, reply, may_be_cut=cut)
            looked_at = reply.finish_reason != "cancelled" or reply.usage.context_tokens > 0
            for parent in known.parents:
                await parent.done.wait()
                if looked_at:  # else nothing was read
                    parent.touch(known.started)
            if any(parent.view is None for parent in known.parents):
                self.world.lose(known)  # nobody saw what a parent wrote, so nothing can be said about this one
                return "unverifiable"
            self._book(known, reply)
            return (
                "ok" if reply.finish_reason == "length" else f"{reply.finish_reason}{' and kept' if reply.kept else ''}"
            )
        except BaseException:
            self.world.lose(known)
            raise
        finally:
            known.done.set()

    def _book(self, known: Known, reply: GenerateResponse) -> None:
        top = tuple(dict(one.top) | {one.token: one.logprob} for one in reply.logprobs or ())
        known.node = replace(known.node, generated=reply.tokens, top=top)
        known.view = look(known.node, {p.id: (p.node, p.view) for p in known.parents if p.view is not None})
        known.reply = reply
        if reply.finish_reason != "cancelled" or reply.usage.context_tokens:  # else cancelled before it was looked at
            checks.usage(known.node, known.view, reply, nothing_again=not self.has("evict"))
        if not reply.kept:
            if known.body.get("keep", True) and known.undisturbed and not self._swept(known):
                raise Violation(f"{known.node.name} {known.id}: not kept, and nobody asked for that")
            self.world.remove(known)
        elif known.released:
            self.world.remove(known)
        elif not known.body.get("keep", True):
            raise Violation(f"{known.node.name} {known.id}: kept, though keep was false")
        else:
            known.phase = "sealed"
            known.shaken, known.interrupted = known.shaken or known.interrupted, False
            known.made = time.monotonic()
            known.touch(known.started)
            if self.world.flushes.overlaps(known.started):
                known.doubt_from = known.started

    def excused(self, known: Known, answer: Answer) -> bool:
        """Whether a generate may have been refused like this."""
        if answer.code in GONE:
            return self._may_be_gone(known)
        if answer.code == "rate_limited":
            return self.has("quota")
        if answer.code == "pool_exhausted":
            return self.crowded(known.started)
        stopped = known.interrupted or self._swept(known)
        return answer.code == "internal" and stopped and not self.has("cancelled") and "aborted" in answer.message

    def _refused(self, known: Known, answer: Answer) -> None:
        if self.excused(known, answer):
            return
        refs = [f"{ref.kind} {ref.id} {self._fate(known, ref.id)}" for ref in known.node.refs]
        told = f"{answer.status} {answer.code}: {answer.message}"
        raise Violation(f"{known.node.name} {known.id}: {told} (references {refs}, spoken for {self.world.tokens})")

    def released(self, known: Known, answer: Answer, *, doubted: bool) -> str:
        """Book the answer to a release of a state that is marked as ending. `doubted`: it may have been gone before."""
        if answer.ok:
            known.released = True
            if known.phase != "running":
                self.world.remove(known, released=True)
            return "ok"
        if answer.code not in GONE:
            raise Violation(f"release of {known.node.name} {known.id}: {answer.status} {answer.code} {answer.message}")
        if known.phase == "running":  # not there yet, or failed
            known.ending, known.interrupted = False, True
            return answer.code
        self.world.lose(known)  # if it was asked for before it was there, it may be there now
        if not doubted:
            raise Violation(f"release of {known.node.name} {known.id}: {answer.code}, but it must be there")
        return answer.code

    def gone(self, what: str, answer: Answer) -> str:
        """The answer about something that is certainly not there, or not the caller's."""
        if answer.code not in GONE:
            raise Violation(f"{what}: {answer.status} {answer.code} {answer.message}, but it is not there")
        return answer.code

    def crowded(self, since: float) -> bool:
        """Whether so much is spoken for that something may be refused."""
        return self.world.crowded + AFTERMATH >= since or self.world.floods.overlaps(since)

    def _swept(self, known: Known) -> bool:
        return self.world.sweeps.overlaps(known.started) or self.world.flushes.overlaps(known.started)

    def _may_be_gone(self, known: Known) -> bool:
        # One that was interrupted and then made after all was not there in between.
        parents_sure = all(one.sure and not (one.shaken and known.started <= one.made) for one in known.parents)
        return not parents_sure or not known.undisturbed or self._swept(known)

    def _fate(self, known: Known, state_id: str) -> str:
        parent = next((one for one in known.parents if one.id == state_id), None)
        return "?" if parent is None else f"{parent.phase}{'' if parent.sure else ' (doubted)'}"
