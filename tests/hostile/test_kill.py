"""Processes that are killed or stopped, of a client and of the server: what is told to whom; nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from anabranch import AsyncClient, State, StateNotFoundError
from tests.engine.api import PATH, body
from tests.hostile.remains import Remains, mortal
from tests.serving import Served, free_port

pytestmark = pytest.mark.engine

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
LEASE = 2.0
TICK = 1.0
"""Seconds: how often the server looks at the leases."""
SLACK = 2.0
SECONDS_TO_END = 20.0
PROGRAM = """
import asyncio, sys
from anabranch import AsyncClient

async def main(url):
    async with AsyncClient(url, lease=2) as client:
        forks = await client.root("r" * 40).fork(3)
        kept = [(await one.generate("q", max_tokens=4, ignore_eos=True)).state for one in forks]
        print("holds", flush=True)
        await asyncio.sleep(3)
        async with kept[0].append("on").stream(max_tokens=180, ignore_eos=True) as stream:
            async for _ in stream.text():
                print("streams", flush=True)

asyncio.run(main(sys.argv[1]))
"""


def test_what_a_killed_client_held_is_gone_one_lease_later(besieged: Served):
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, besieged.url], stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "holds\n"
        expired = besieged.stats()["expired"]
        assert program.stdout.readline() == "streams\n"
        stats = besieged.stats()
        assert (stats["states"], stats["running"], stats["expired"]) == (4, 1, expired), "it renewed what it holds"
    finally:
        program.kill()
    died = time.monotonic()
    while besieged.stats()["running"]:
        assert time.monotonic() < died + SLACK, "nobody reads the stream, but it goes on"
        time.sleep(0.05)
    assert besieged.stats()["states"] == 4
    while besieged.stats()["states"]:
        assert time.monotonic() < died + LEASE + TICK + SLACK, besieged.stats()
        time.sleep(0.05)
    assert time.monotonic() > died + LEASE / 2, "a beat is a third of a lease"
    stats = besieged.stats()
    assert stats["free_tokens"] + stats["evictable_tokens"] == stats["total_tokens"], stats
    assert stats["expired"] == expired + 4


@pytest.mark.parametrize("victim", ["sglang::scheduler", "main", "supervisor"])
def test_a_server_of_which_a_process_is_killed_ends_and_leaves_nothing(victim: str, tiny_model: Path, tmp_path: Path):
    with mortal(tiny_model, tmp_path / "log") as (served, remains), ThreadPoolExecutor(3) as pool:
        pending = [pool.submit(endless, served, stream=stream) for stream in (False, True, False)]
        running(served, 3)
        remains.process(victim).kill()
        killed = time.monotonic()
        for one in pending:
            assert isinstance(one.exception(SECONDS_TO_END), httpx.TransportError), one
        status = served.process.wait(SECONDS_TO_END)
        print(f"\n{victim}: ended after {time.monotonic() - killed:.1f} s with status {status}")
        if victim != "supervisor":
            assert status == 1
            assert "anabranch serve: the server ended by SIGKILL" in served.log.strip().splitlines()[-1], served.log
        left = remains.left()
        if victim == "supervisor":  # nobody is there to remove files; the next server's business
            left = [one for one in left if one.startswith("process")]
        assert not left, left


async def test_a_stopped_and_restarted_server_loses_states_and_the_sdk_makes_them_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    port = free_port()
    monkeypatch.setattr("tests.serving.free_port", lambda: port)
    with mortal(tiny_model, tmp_path / "first") as (served, remains):
        async with AsyncClient(served.url) as strict, AsyncClient(served.url, on_lost="rebuild") as lasting:
            lost = await strict.root("strict").fork()
            states = await dag(lasting)
            expected = await states[-1].generate("And then?", max_tokens=8, **GREEDY)
            stopped(served, remains, signal.SIGTERM, 0)
            with mortal(tiny_model, tmp_path / "second") as (again, new_remains):
                assert again.url == served.url
                with pytest.raises(StateNotFoundError):
                    await lost.generate("x", max_tokens=1)
                answer = await states[-1].generate("And then?", max_tokens=8, **GREEDY)
                assert answer.tokens == expected.tokens
                made = again.get("/anabranch/v1/states").json()["states"]
                ids = [one["id"] for one in made]
                wanted = [one.id for one in (*states, answer.state)]
                assert sorted(ids) == sorted(wanted), "each once, and nothing else"
                # the warm-up of the server makes none
                assert again.stats()["created"] == len(wanted)
                assert [one.standing for one in states] == ["on server"] * len(states)
                await asyncio.to_thread(stopped, again, new_remains, signal.SIGINT, 128 + signal.SIGINT)


async def dag(client: AsyncClient) -> Sequence[State]:
    """Root, a forked child with input only, two generated children, a join with an artifact."""
    root = client.root("You are a river. ")
    read = (await root.fork()).append("Mountains lie behind you. ")
    pro, con = await read.fork(2)
    one = (await pro.generate("For:", max_tokens=6, **GREEDY)).state
    other = (await con.generate("Against:", max_tokens=6, **GREEDY)).state
    joined = client.state().inherit(one).artifact(other).place("concat")
    verdict = (await joined.append("So:").generate(max_tokens=5, **GREEDY)).state
    return [root, read, one, other, verdict]


def endless(served: Served, *, stream: bool) -> str:
    """A generation that outlives any of these tests."""
    asked = body(text="on and on", n=7000, stream=stream)
    return httpx.post(served.url + PATH, json=asked, timeout=120).text


def running(served: Served, count: int) -> None:
    deadline = time.monotonic() + 30
    while served.stats()["running"] < count:
        assert time.monotonic() < deadline, served.stats()
        time.sleep(0.05)


def stopped(served: Served, remains: Remains, number: signal.Signals, status: int) -> None:
    """A server that is told to stop while a request runs ends cleanly; Ctrl-C goes to its whole group."""
    with ThreadPoolExecutor(1) as pool:
        asked = body(text="a short one", n=400)
        pending = pool.submit(httpx.post, served.url + PATH, json=asked, timeout=60)
        running(served, 1)
        os.killpg(served.process.pid, number)
        began = time.monotonic()
        assert served.process.wait(30) == status, served.log[-3000:]
        print(
            f"\n{number.name}: ended after {time.monotonic() - began:.1f} s; the request: {pending.exception() or 200}"
        )
    assert "Traceback" not in served.log, served.log
    left = remains.left()
    assert not left, left
