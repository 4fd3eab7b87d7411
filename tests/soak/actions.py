"""Carries operations out against the server: one method for each kind of operation.

What it draws comes from drawing.py, what may come back is judged in judge.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from anabranch.wire import Explanation, GenerateResponse
from tests.oracle.run import check_explanation

from . import checks
from .calls import Answer, Calls, Violation
from .drawing import Draw
from .judge import GONE, Judge
from .operations import Operation
from .tally import Tally
from .tiny import BYTES
from .world import Known, World, lineage

MOST_STATES = 60
ROOM, ROOM_IF_EVICTED = 0.4, 1.5
"""Share of the pool that states may take before some are released; more than all of it where states are evicted."""
LONG = 32
"""Tokens of a generation that is meant to be stopped on its way."""
LEASES = (1.0, 1.5, 2.0)


@dataclass(slots=True)
class Actions:
    """`keys` are the API keys of the tenants; (None,) without tenancy. `pool` is its number of tokens."""

    calls: Calls
    world: World
    judge: Judge
    tally: Tally
    pool: int
    keys: Sequence[str | None] = (None,)
    plain_answers: deque[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=lambda: deque(maxlen=4))

    async def carry_out(self, operation: Operation) -> None:
        draw = Draw(operation, operation.dice(), self.world, self.judge.has)
        draw.key = draw.dice.choice(self.keys)
        outcome = await getattr(self, f"_{operation.kind}")(draw)
        self.tally.count(operation.kind, outcome)

    # ------------------------------------------------------------ making states

    async def compute(self, known: Known, *, stream: bool = False) -> str:
        """Send a request and book its end."""
        self.world.add(known)
        return await self._finish(known, stream=stream)

    async def _parents_accepted(self, known: Known) -> None:
        """A request may name another that still runs, but only once the server knows that one."""
        for parent in known.parents:
            while parent.phase == "running" and not (await self.calls.info(parent.id, parent.key)).ok:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def _finish(self, known: Known, *, stream: bool = False) -> str:
        try:
            await self._parents_accepted(known)
            if not stream:
                answer = await self.calls.generate(known.body, known.key)
            else:
                answer, events = await self.calls.stream(known.body, known.key)
                if answer.ok:
                    _same_text_and_tokens(known, events, answer)
        except BaseException:
            self.world.lose(known)
            known.done.set()
            raise
        return await self.judge.generated(known, answer)

    async def _make(self, draw: Draw) -> str:
        await self._make_room()
        kind, dice = draw.operation.kind, draw.dice
        if kind != "fork":
            return await self.compute(draw.state(kind, **self._whims(draw)))
        refs, parents = draw.refs("fork")
        children = [draw.child(refs, parents) for _ in range(dice.choice((2, 2, 3, 4)))]
        outcomes = await asyncio.gather(*(self.compute(child) for child in children))
        return outcomes[0] if len(set(outcomes)) == 1 else "several"

    _root = _fork = _join = _artifact = _rewind = _once = _make

    def _whims(self, draw: Draw) -> dict[str, Any]:
        return {"keep": False} if draw.dice.random() < 0.04 else {}

    async def _stream(self, draw: Draw) -> str:
        await self._make_room()
        known = draw.state(draw.shape())
        if not self.judge.has("streamed_logprobs"):
            known.body["sampling"].pop("logprobs", None)
            known.body["sampling"].pop("top_logprobs", None)
        return await self.compute(known, stream=True)

    async def _lease(self, draw: Draw) -> str:
        await self._make_room()
        return await self.compute(draw.state(draw.shape(), lease=draw.dice.choice(LEASES)))

    async def _make_room(self) -> None:
        """Release the oldest, so that there is something to do besides being refused."""
        share = ROOM_IF_EVICTED if self.judge.has("evict") else ROOM
        while len(self.world.states) > MOST_STATES or self.world.tokens > share * self.pool:
            sealed = [one for one in self.world.states.values() if one.phase == "sealed" and not one.ending]
            if not sealed:
                return
            await self.give_up(sealed[0])

    # ------------------------------------------------------------ requests that do not end by themselves

    async def _stream_drop(self, draw: Draw) -> str:
        known = draw.state(draw.shape(), longest=LONG, shortest=4, **self._partial(draw))
        self.world.add(known)
        try:
            await self._parents_accepted(known)
            await self.calls.stream_a_little(known.body, known.key, draw.dice.randint(1, 4))
        finally:
            self._nobody_saw(known)
        return await self._give_up_lost(known)

    async def _request_drop(self, draw: Draw) -> str:
        """The client gives up at a random moment; then it asks again, or gives the state up."""
        known = draw.state(draw.shape(), longest=LONG)
        self.world.add(known)
        try:
            await self._parents_accepted(known)
            async with asyncio.timeout(draw.dice.random() ** 2 * 0.4):
                await self.calls.generate(known.body, known.key)
        except TimeoutError:
            pass
        except BaseException:
            self._nobody_saw(known)
            raise
        known.interrupted = True
        if self.judge.has("repeat") and draw.dice.random() < 0.5:
            outcome = await self._finish(known)
            if known.id not in self.world.states:  # the first may have been read after the second was answered
                self.world.lost[known.id] = known.key
            return f"again: {outcome}"
        self._nobody_saw(known)
        return await self._give_up_lost(known)

    async def _interfere(self, draw: Draw) -> str:
        """Stop a request that runs: somebody else's, or one that is started for this."""
        dice, own = draw.dice, None
        running = [one for one in self.world.running() if one.asked > 2]
        if running and dice.random() < 0.4:
            victim = dice.choice(running)
        else:
            victim = draw.state(draw.shape(), longest=LONG, shortest=6, **self._partial(draw))
            own = asyncio.create_task(self.compute(victim))
            await asyncio.sleep(dice.random() ** 2 * 0.3)
        try:
            outcome = await self._stop(draw.operation.kind, victim)
        finally:
            end = await own if own is not None else "somebody else's"
        return f"{outcome} then {end}"

    _cancel = _abort = _release_running = _interfere

    async def _stop(self, kind: str, victim: Known) -> str:
        if victim.phase == "gone" or victim.ending:
            return "over already"
        if kind == "release_running":
            return await self.give_up(victim)
        if victim.phase == "running":
            victim.interrupted = True
        if kind == "abort":
            return (await self.calls.abort(victim.id)).code
        answer = await self.calls.cancel(victim.id, victim.key)
        if not answer.ok and answer.code not in GONE:
            raise Violation(f"cancel of {victim.node.name} {victim.id}: {answer.status} {answer.code} {answer.message}")
        return answer.code

    def _partial(self, draw: Draw) -> dict[str, Any]:
        return {"keep_partial": True} if self.judge.has("keep_partial") and draw.dice.random() < 0.5 else {}

    async def _abort_all(self, draw: Draw) -> str:
        with self.world.sweeps.open():
            return (await self.calls.abort(None)).code

    def _nobody_saw(self, known: Known) -> None:
        known.interrupted = True
        self.world.lose(known)
        known.done.set()

    async def _give_up_lost(self, known: Known) -> str:
        answer = await self.calls.release(known.id, known.key)
        if not answer.ok and answer.code not in GONE:
            raise Violation(f"release of {known.node.name} {known.id}: {answer.status} {answer.code} {answer.message}")
        return f"dropped then {answer.code}"

    # ------------------------------------------------------------ giving up, keeping

    async def give_up(self, known: Known) -> str:
        if known.phase == "gone" or known.ending:
            return "over already"
        since, doubted = time.monotonic(), known.phase == "running" or not known.sure
        known.ending = True
        answer = await self.calls.release(known.id, known.key)
        return self.judge.released(known, answer, doubted=doubted or self.world.flushes.overlaps(since))

    async def _release(self, draw: Draw) -> str:
        sealed = self.world.sealed(draw.key)
        return await self.give_up(draw.dice.choice(sealed)) if sealed else "nothing to release"

    async def _release_batch(self, draw: Draw) -> str:
        sealed, dice, since = self.world.sealed(draw.key), draw.dice, time.monotonic()
        chosen = dice.sample(sealed, min(len(sealed), dice.randint(1, 12)))
        doubted = {known.id: not known.sure for known in chosen}
        ghost = draw.operation.state_id(99)
        for known in chosen:
            known.ending = True
        answer = await self.calls.release_batch([*doubted, ghost], draw.key)
        if not answer.ok:
            raise Violation(f"release of {len(chosen)} states: {answer.status} {answer.code} {answer.message}")
        released, unknown = {*answer.body["released"]}, {*answer.body["unknown"]}
        if released & unknown or released | unknown != {*doubted, ghost} or ghost in released:
            raise Violation(f"release of {[*doubted, ghost]}: {answer.body}")
        for known in chosen:
            one = Answer(200, "ok") if known.id in released else Answer(404, "state_not_found", "in a batch")
            self.judge.released(known, one, doubted=doubted[known.id] or self.world.flushes.overlaps(since))
        return "ok"

    async def _renew(self, draw: Draw) -> str:
        sealed, dice, since = self.world.sealed(draw.key), draw.dice, time.monotonic()
        chosen = dice.sample(sealed, min(len(sealed), dice.choice((1, 2, 8))))
        if not chosen:
            return "nothing to renew"
        lease = dice.choice(LEASES) + 2 if dice.random() < 0.3 and all(one.lease for one in chosen) else None
        answer = await self.calls.renew([known.id for known in chosen], draw.key, lease)
        if len(chosen) == 1:
            if not answer.ok and (answer.code not in GONE or chosen[0].sure):
                raise Violation(f"renew of {chosen[0].id}: {answer.status} {answer.code} {answer.message}")
            lost = set() if answer.ok else {chosen[0].id}
        elif answer.ok and {*answer.body["renewed"], *answer.body["lost"]} == {known.id for known in chosen}:
            lost = {*answer.body["lost"]}
        else:
            raise Violation(f"renew of {[one.id for one in chosen]}: {answer.status} {answer.message} {answer.body}")
        for known in chosen:
            if known.id not in lost:
                known.touch(since, lease)
            elif known.sure:
                raise Violation(f"renew: {known.node.name} {known.id} is lost")
            elif not known.ending:
                self.world.remove(known)
        return "some lost" if lost else "ok"

    # ------------------------------------------------------------ asking again, asking wrongly, looking

    async def _repeat(self, draw: Draw) -> str:
        """The same request again: at the same time, or later."""
        sealed = [one for one in self.world.sealed(draw.key) if one.sure]
        if sealed and draw.dice.random() < 0.5:
            known, since = draw.dice.choice(sealed), time.monotonic()
            answer = await self.calls.generate(known.body, known.key)
            if answer.ok and known.reply is not None:
                checks.same(known.node, known.reply, GenerateResponse.model_validate(answer.body))
                known.touch(since)
            elif answer.code not in GONE or known.sure:
                raise Violation(f"{known.node.name} {known.id} again: {answer.status} {answer.code} {answer.message}")
            return f"later: {answer.code}"
        known = draw.state(draw.shape())
        self.world.add(known)
        await self._parents_accepted(known)
        outcome, answer = await asyncio.gather(self._finish(known), self.calls.generate(known.body, known.key))
        # One that was cancelled, and left nothing, may be asked for again: then the second was the first.
        ends = known.reply, GenerateResponse.model_validate(answer.body) if answer.ok else None
        made = [reply for reply in ends if reply is not None and (reply.kept or reply.finish_reason != "cancelled")]
        if known.reply is not None and len(made) == len(ends):
            checks.same(known.node, *made)
        elif answer.ok:
            self.world.lost[known.id] = known.key
        elif answer.code in GONE and (not made or any(one.shaken or one.interrupted for one in known.parents)):
            pass  # a parent was cancelled and made again, between the two
        elif answer.code != outcome and not self.judge.excused(known, answer):
            raise Violation(f"{known.node.name} {known.id} twice: {outcome}, and {answer.code} {answer.message}")
        return f"at once: {answer.code}"

    async def _other_body(self, draw: Draw) -> str:
        """An id that is in use, with another body."""
        sealed = [one for one in self.world.sealed(draw.key) if one.sure]
        if not sealed:
            return "nothing there"
        known = draw.dice.choice(sealed)
        answer = await self.calls.generate({**known.body, "input": [{"tokens": [7, 7, 7, 7, 7, 7]}]}, known.key)
        if answer.code not in ("invalid_request", *(() if known.sure else GONE)):
            raise Violation(f"{known.node.name} {known.id} with another body: {answer.status} {answer.code}")
        return answer.code

    async def _ghost(self, draw: Draw) -> str:
        """A reference to, or a question about, something that was given up or never was."""
        ghosts = [state_id for state_id, key in self.world.ghosts if key == draw.key]
        state_id = draw.dice.choice([*ghosts[-8:], draw.operation.state_id(98)])
        return self.judge.gone(f"the state {state_id}", await self._ask(draw, state_id, draw.key))

    async def _trespass(self, draw: Draw) -> str:
        """Somebody else's state."""
        states = [one for one in self.world.states.values() if one.key != draw.key]
        if not states:
            return "nothing there"
        state_id = draw.dice.choice(states).id
        return self.judge.gone(f"somebody else's state {state_id}", await self._ask(draw, state_id, draw.key))

    async def _ask(self, draw: Draw, state_id: str, key: str | None) -> Answer:
        ways = ["generate", "generate", "info", "release", "explain"]
        ways += [way for way in ("cancel", "renew") if self.judge.has(way)]
        match draw.dice.choice(ways):
            case "generate":
                refs = [{"kind": draw.dice.choice(("inherit", "artifact")), "id": state_id}]
                return await self.calls.generate({**draw.state("root").body, "refs": refs}, key)
            case "renew":
                return await self.calls.renew([state_id], key)
            case way:
                return await getattr(self.calls, way)(state_id, key)

    async def _explain(self, draw: Draw) -> str:
        sealed = [one for one in self.world.sealed(draw.key) if one.sure and one.lease is None]
        if not sealed:
            return "nothing there"
        known = draw.dice.choice(sealed)
        answer = await self.calls.explain(known.id, known.key)
        if answer.ok:
            views = {one.id: one.view for one in lineage([known]) if one.view is not None}
            check_explanation(known.node, views, Explanation.model_validate(answer.body))
        elif answer.code not in GONE or known.sure:
            raise Violation(f"explain {known.node.name} {known.id}: {answer.status} {answer.code} {answer.message}")
        return answer.code

    async def _look(self, draw: Draw) -> str:
        sure = {known.id for known in self.world.sealed(draw.key) if known.sure}
        listed = await self.calls.listed(draw.key)
        missing = [known for known in self.world.sealed(draw.key) if known.id in sure - listed and known.sure]
        if missing:
            one = missing[0]
            raise Violation(f"GET states: {one.node.name} {one.id} is missing (lease {one.lease}, used {one.used:.1f})")
        return "ok"

    # ------------------------------------------------------------ the rest of the server

    async def _plain(self, draw: Draw) -> str:
        dice, began = draw.dice, time.monotonic()
        prompt = tuple(dice.randrange(BYTES) for _ in range(dice.choice((3, 8, 30))))
        if self.plain_answers and dice.random() < 0.3:
            prompt = (*self.plain_answers[0][0], *prompt)[:60]  # its prefix may be cached
        asked = dice.choice((1, 4, 8))
        answer = await self.calls.plain(prompt, asked)
        reason = (answer.body or {}).get("meta_info", {}).get("finish_reason") if answer.ok else None
        if answer.ok and reason and reason["type"] == "length":
            self.tally.plain.append(time.monotonic() - began)
            if len(answer.body["output_ids"]) != asked:
                raise Violation(f"plain request {draw.operation.index}: {answer.body}")
            self.plain_answers.append((prompt, tuple(answer.body["output_ids"])))
            return "ok"
        swept = self.world.sweeps.overlaps(began) or self.world.flushes.overlaps(began)
        if swept or (answer.status == 503 and self.judge.crowded(began)):
            return "aborted" if swept else "refused"
        raise Violation(f"plain request {draw.operation.index}: {answer.status} {answer.message} {answer.body}")

    async def _fill(self, draw: Draw) -> str:
        """More long roots than fit, all at once. Some stay if states can be evicted."""
        with self.world.floods.open():
            roots = [draw.long_root() for _ in range(draw.dice.randint(4, 10))]
            outcomes = await asyncio.gather(*(self.compute(root) for root in roots))
            there = [root for root in roots if root.phase == "sealed" and not root.ending]
            stay = draw.dice.randint(0, 2) if self.judge.has("evict") else 0
            await asyncio.gather(*(self.give_up(root) for root in there[stay:]))
        return "all fitted" if set(outcomes) == {"ok"} else "refused"

    async def _flush(self, draw: Draw) -> str:
        return await self.flush()

    async def flush(self) -> str:
        """SGLang clears its whole pool, if nothing runs: which states are there afterwards is then looked up.

        Those that somebody is ending (in vain perhaps) are doubted from now on, unless they are there."""
        known = [one for one in self.world.states.values() if one.phase == "sealed"]
        since = time.monotonic()
        before = {one: one.doubt_from for one in known}
        for one in known:
            one.doubt_from = min(one.doubt_from, since)
        with self.world.flushes.open():
            answer = await self.calls.flush()
            listed = {state_id for key in self.keys for state_id in await self.calls.listed(key)}
        for one in known:
            if one.id in listed:
                if one.doubt_from == min(before[one], since):  # else its lease began anew meanwhile
                    one.doubt_from = before[one]
            elif not one.ending:
                self.world.remove(one)
        return "flushed" if answer.ok else "busy"


def _same_text_and_tokens(known: Known, events: Sequence[dict[str, Any]], answer: Answer) -> None:
    """What was streamed, put together, is what the final event says."""
    text, tokens = "".join(event["text"] for event in events), [t for event in events for t in event["tokens"]]
    if tokens != answer.body["tokens"]:
        raise Violation(f"{known.node.name} {known.id}: streamed {tokens}, in the end {answer.body['tokens']}")
    if text != answer.body["text"]:
        raise Violation(f"{known.node.name} {known.id}: streamed {text!r}, in the end {answer.body['text']!r}")
