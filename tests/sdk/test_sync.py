"""The synchronous client: the same results without await, from one thread and from several."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import anabranch
from anabranch import AsyncClient, Client, InvalidRequestError, StateReleasedError, sync
from anabranch.testing import FakeServer


@pytest.fixture
def plain(server: FakeServer) -> Any:
    with Client(transport=server) as client:
        yield client


def test_the_example_of_the_contract(plain: Client, server: FakeServer):
    root = plain.root("You are careful.")
    pro, con = root.fork(2)
    p = pro.generate("Argue for.", max_tokens=64)
    c = con.generate("Argue against.", max_tokens=2)
    assert isinstance(p.state, sync.State) and (c.text, c.finish_reason) == ("one two", "length")
    joined = plain.state().inherit(p.state).artifact(c.state).place("concat").append("Weigh both.")
    assert joined.explain().context_tokens == 3 + 6 + 2
    with joined.stream("Go on.", temperature=0) as s:
        assert list(s.text()) == ["one", " two", " three", " four"]
        assert s.final().state.refs[0].kind == "inherit"
    with joined.stream() as s:
        assert [event.type for event in s] == ["delta"] * 4 + ["final"]
    assert len(plain.states()) == 5 and plain.stats().states == 5 and plain.health().status == "ok"
    p.state.release()
    plain.release(c.state, p.state)
    with pytest.raises(StateReleasedError):
        p.state.generate("x")
    assert isinstance(root.fork(), sync.State) and isinstance(root.fork(at=1), sync.State)


def test_the_facade_has_every_method_with_the_same_arguments():
    pairs = [(anabranch.State, sync.State), (AsyncClient, Client), (anabranch.Scope, sync.Scope)]
    # The sync facade has no need for these: `close` for `aclose`, and what the session calls inside.
    apart = {"aclose", "own", "disown", "activate", "deactivate", "finish"}
    for original, facade in (*pairs, (anabranch.Stream, sync.Stream)):
        for name, member in inspect.getmembers(original, inspect.isfunction):
            if name.startswith("_") or name in apart or (original is anabranch.Scope and name == "release"):
                continue
            assert (
                inspect.signature(member).parameters.keys()
                == inspect.signature(getattr(facade, name)).parameters.keys()
            ), name


def test_several_threads_share_one_client(plain: Client, server: FakeServer):
    root = plain.root("a long document")

    def work(i: int) -> str:
        return root.fork().generate(f"question {i}").state.id

    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(work, range(24)))
    assert len(set(ids)) == 24
    assert [body["id"] for body in server.generated].count(root.id) == 1


def test_a_scope_holds_for_its_thread(plain: Client, server: FakeServer):
    inside, go = threading.Event(), threading.Event()

    def beside() -> None:
        inside.wait()
        plain.root("beside").generate()
        go.set()

    thread = threading.Thread(target=beside)
    thread.start()
    with pytest.raises(ZeroDivisionError), plain.scope() as scope:
        kept = plain.root("kept").generate().state
        plain.root("a").generate()
        scope.keep(kept)
        inside.set()
        go.wait(5)
        assert len(server._held) == 3
        raise ZeroDivisionError
    thread.join()
    assert {state.request.id for state in server._held} >= {kept.id} and len(server._held) == 2
    with plain.scope():
        with plain.scope():
            plain.root("inner").generate()
        plain.root("outer").generate()
        assert len(server._held) == 3
    plain.root("after").generate()
    assert len(server._held) == 3, "beside, kept, after"


def test_leaving_a_stream_early_closes_it(plain: Client, server: FakeServer):
    with plain.root("a").stream() as s:
        for _ in s.text():
            break
    assert len(server.cancelled) == 1 and server._held == []


def test_errors_are_the_same(plain: Client, server: FakeServer):
    with pytest.raises(InvalidRequestError, match="not str"):
        plain.state().inherit("x")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="no input"):
        plain.state().generate()
    with Client(transport=server) as other, pytest.raises(InvalidRequestError, match="another client"):
        plain.state().inherit(other.root("a"))


def test_a_closed_client_says_so(server: FakeServer):
    client = Client(transport=server)
    s = client.root("a")
    client.close()
    client.close()
    for use in (s.fork, client.stats, client.__enter__, client.scope().__enter__):
        with pytest.raises(anabranch.ClientClosedError):
            use()
    assert repr(client).startswith("Client(") and "closed" in repr(client)


def test_an_interrupt_cancels_the_call(server: FakeServer, monkeypatch: pytest.MonkeyPatch):
    import asyncio

    ended: list[str] = []

    class Slow(FakeServer):
        async def request(self, *args: Any, **kwargs: Any) -> Any:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

    from concurrent.futures import Future

    with Client(transport=Slow()) as client:
        real = Future.result

        def interrupted(self: Any, timeout: float | None = None) -> Any:
            monkeypatch.setattr(Future, "result", real)
            import time

            time.sleep(0.05)
            raise KeyboardInterrupt

        call = client.root("a").generate
        start = client.loop.portal.start_task_soon

        def start_then_interrupt(*args: Any) -> Any:
            future = start(*args)
            monkeypatch.setattr(Future, "result", interrupted)
            return future

        monkeypatch.setattr(client.loop.portal, "start_task_soon", start_then_interrupt)
        with pytest.raises(KeyboardInterrupt):
            call()
        monkeypatch.undo()
        client.loop.run(lambda: asyncio.sleep(0.05))
        assert ended == ["cancelled"]


def test_a_program_that_forgets_to_close_still_ends():
    program = (
        "from anabranch import Client; from anabranch.testing import FakeServer; c = Client(transport=FakeServer())"
    )
    program += "; print(c.root('a').generate())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
