"""Leases: what a client asks for, what it renews in the background, and what it learns by that. No clock runs here.

What happens to lost states afterwards is test_rebuild.py's.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any

import pytest

from anabranch import AsyncClient, Client, InvalidRequestError, StateNotFoundError
from anabranch.errors import APIConnectionError
from anabranch.lease import Heartbeat, renew_held
from anabranch.testing import FakeServer

RENEW = "/anabranch/v1/states/renew"


class Clock:
    """Time that passes when it is told to: each `tick` lets every sleeper go on, once."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._sleepers: list[asyncio.Future[None]] = []

    async def sleep(self, seconds: float) -> None:
        self.asked.append(seconds)
        self._sleepers.append(sleeper := asyncio.get_running_loop().create_future())
        await sleeper

    async def tick(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            if not sleeper.cancelled():
                sleeper.set_result(None)
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("anabranch.session.Heartbeat", lambda renew, lease: Heartbeat(renew, lease, sleep=clock.sleep))
    return clock


def renewed(server: FakeServer) -> list[list[str]]:
    return [body["ids"] for _, path, body in server.requests if path == RENEW and body]


async def test_every_generate_asks_for_the_lease(server: FakeServer):
    async with server.client(lease=20) as client:
        await (await client.root("a").fork()).generate("b")
        async with client.root("c").stream() as s:
            await s.final()
        assert [info.lease for info in await client.states()] == [20, 20, 20]
    assert [body["lease"] for body in server.generated] == [20, 20, 20]


async def test_what_is_held_is_renewed_three_times_per_lease_in_one_request(clock: Clock, server: FakeServer):
    async with server.client(lease=30) as client:
        root = client.root("a")
        await clock.tick()
        assert clock.asked == [], "nothing is on the server yet"
        children = await root.fork(2)
        done = [(await child.generate("q")).state for child in children]
        await clock.tick()
        await clock.tick()
        assert renewed(server) == [[root.id, done[0].id, done[1].id]] * 2
        assert set(clock.asked) == {10}
        await done[0].release()
        await clock.tick()
        assert renewed(server)[2] == [root.id, done[1].id]


async def test_what_nobody_can_name_is_not_renewed(clock: Clock, server: FakeServer):
    async with server.client() as client:
        root = client.root("a")
        child = (await (await root.fork()).generate("b")).state
        root_id = root.id
        await client.root("forgotten").generate()
        del root
        gc.collect()
        await clock.tick()
        assert renewed(server) == [[root_id, child.id]], "a child in hand names its parents"
        del child
        gc.collect()
        await clock.tick()
        await clock.tick()
        assert len(renewed(server)) == 1
        sleeps = len(clock.asked)
        again = (await client.root("b").generate()).state
        await clock.tick()
        assert renewed(server)[1:] == [[again.id]] and len(clock.asked) == sleeps + 2, "it begins again"


async def test_a_scope_that_has_ended_keeps_nothing_alive(clock: Clock, server: FakeServer):
    async with server.client() as client:
        async with client.scope() as scope:
            kept = (await client.root("a").generate()).state
            scope.keep(kept)
        await clock.tick()
        assert renewed(server) == [[kept.id]]
        del kept, scope
        gc.collect()
        await clock.tick()
        assert len(renewed(server)) == 1


async def test_very_many_states_are_renewed_in_several_requests(
    clock: Clock, server: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("anabranch.lease.MAX_IDS", 2)
    async with server.client() as client:
        states = [(await client.root("a").generate()).state for _ in range(5)]
        await clock.tick()
        assert [len(ids) for ids in renewed(server)] == [2, 2, 1]
        assert {name for ids in renewed(server) for name in ids} == {state.id for state in states}


async def test_a_failing_renewal_is_told_once_and_tried_again(
    clock: Clock, server: FakeServer, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING, "anabranch")
    async with server.client() as client:
        state = (await client.root("a").generate()).state
        server.fail_next(APIConnectionError("nobody there"), times=2)
        await clock.tick()
        await clock.tick()
        assert len(caplog.records) == 1 and "nobody there" in caplog.text
        await clock.tick()
        assert state.standing == "on server" and len(renewed(server)) == 3
        server.fail_next("internal")
        await clock.tick()
        assert len(caplog.records) == 2, "told once per outage"


async def test_a_renewal_that_hangs_does_not_use_up_the_lease(clock: Clock, server: FakeServer):
    timeouts: list[float | None] = []
    original = server.request

    async def request(method: str, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        if path == RENEW:
            timeouts.append(timeout)
        return await original(method, path, body, timeout=timeout)

    server.request = request  # type: ignore[method-assign]
    for lease in (300, 6):
        async with server.client(lease=lease) as client:
            state = (await client.root("a").generate()).state
            await clock.tick()
            await state.release()
    assert timeouts == [10, 2]


async def test_what_a_renewal_calls_lost_is_lost(clock: Clock, server: FakeServer):
    async with server.client() as client:
        lost, kept = [(await client.root("a").generate()).state for _ in range(2)]
        server.expire(lost)
        assert lost.standing == "on server", "nobody has said so yet"
        await clock.tick()
        assert (lost.standing, kept.standing) == ("lost", "on server")
        sent = len(server.requests)
        for use in (lost.fork, lost.explain, lost.renew, lambda: lost.generate("x")):
            with pytest.raises(StateNotFoundError, match="was lost") as caught:
                await use()
            assert "on_lost" in str(caught.value.hint)
        with pytest.raises(StateNotFoundError):
            client.state().inherit(lost)
        await lost.release()
        assert len(server.requests) == sent, "all of it is known here"
        await clock.tick()
        assert renewed(server)[1:] == [[kept.id]]


async def test_old_news_is_no_news(server: FakeServer):
    """A state that was made again while the renewal that calls it lost was under way."""
    async with server.client(on_lost="rebuild") as client:
        state = (await client.root("a").generate()).state
        server.expire(state)
        original = server.request

        async def late(method: str, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
            server.request = original  # type: ignore[method-assign]
            answer = await original(method, path, body)
            await state.generate("needs it, and makes it again")
            return answer

        server.request = late  # type: ignore[method-assign]
        assert await renew_held(client.session, 1)
        assert state.standing == "on server"


async def test_a_closed_client_stops_renewing(clock: Clock, server: FakeServer):
    client = server.client()
    state = (await client.root("a").generate()).state
    await client.aclose()
    await clock.tick()
    assert renewed(server) == [] and state.standing == "on server"
    assert [task for task in asyncio.all_tasks() if "heartbeat" in task.get_name()] == []


async def test_renewing_one_state(client: AsyncClient, server: FakeServer):
    state = (await client.root("a").generate()).state
    assert (await state.renew()).lease == 300
    assert (await state.renew(lease=86_400)).lease == 86_400
    await renew_held(client.session, 1)
    assert [info.lease for info in await client.states()] == [86_400], "the client's own renewals leave it so"
    unsent = client.root("b")
    assert (await unsent.renew()).id == unsent.id, "it is computed first"
    for bad in (0, -1, float("nan"), 1e9):
        with pytest.raises(InvalidRequestError, match="lease is"):
            await state.renew(lease=bad)
    with pytest.raises(InvalidRequestError, match="no tokens of its own"):
        await client.state().inherit(state).renew()


def test_a_program_that_does_not_close_its_client_still_ends(server: FakeServer):
    async def program() -> None:
        await AsyncClient(transport=server, lease=0.03).root("a").generate()

    asyncio.run(asyncio.wait_for(program(), 5))


def test_the_synchronous_client_renews_while_nobody_calls_it(server: FakeServer):
    import time

    with Client(transport=server, lease=0.03) as client:
        state = client.root("a").generate().state
        until = time.monotonic() + 5
        while not renewed(server) and time.monotonic() < until:
            time.sleep(0.005)
        assert renewed(server)[0] == [state.id]
        assert state.renew(lease=50).lease == 50
