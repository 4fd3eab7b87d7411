"""`AsyncClient`: one server's states, asynchronously. The one implementation; `sync.py` is a facade over it.

It makes states and scopes; what happens to them is `state.py`'s and `session.py`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self, cast

from anabranch.config import OnLost, resolve
from anabranch.errors import InvalidRequestError
from anabranch.graph import Node, Rules
from anabranch.retry import Retrying
from anabranch.scope import Scope
from anabranch.session import Session
from anabranch.state import State, piece_from
from anabranch.transport import HTTPTransport, Transport
from anabranch.wire import Health, Piece, StateInfo, StateList, Stats


class AsyncClient:
    """A client of one server, for one asyncio event loop.

    `base_url`: else ANABRANCH_BASE_URL, else http://127.0.0.1:30000. `api_key`: else ANABRANCH_API_KEY.
    `timeout`: seconds to wait for an answer or a stream's next event (600). `max_retries`: 2; see `Retrying`.
    `transport` replaces HTTP, for example by `anabranch.testing.FakeServer`.

    `lease`: else ANABRANCH_LEASE, else 300: seconds for which the server keeps a state that is neither used nor
    renewed. In the background the client renews the states that it holds: those that your program can still name, by
    a `State` in hand or one that was made from it. What nobody can name expires, and so does everything one lease after
    the client was closed or died; `state.renew(lease=...)` gives a state a longer life.
    `on_lost`: "rebuild" makes states that the server lost (an expired lease, a restart) again when they are next
    needed, with the tokens that they had generated; "error" raises StateNotFoundError.

    Close it with `async with` or `aclose()`. To give states up before their leases end, see `scope` and `release`.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float | None = None,
        max_retries: int | None = None,
        lease: float | None = None,
        on_lost: OnLost = "error",
        transport: Transport | None = None,
    ) -> None:
        self.config = resolve(
            base_url, api_key=api_key, timeout=timeout, max_retries=max_retries, lease=lease, on_lost=on_lost
        )
        inner = HTTPTransport(self.config) if transport is None else transport
        transport = Retrying(inner, max_retries=self.config.max_retries)
        self.session = Session(transport, lease=self.config.lease, on_lost=on_lost)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config.base_url!r}{', closed' if self.session.closed else ''})"

    async def __aenter__(self) -> Self:
        self.session.check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop what is under way, and renewing, and close the connections. Closing twice is fine."""
        await self.session.aclose()

    # ------------------------------------------------------------ states

    def root(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        tokens: Sequence[int] | None = None,
        rules: Rules | None = None,
    ) -> State:
        """A state without references whose input is a text, chat messages `{"role", "content"}`, or token ids.

        Raises InvalidRequestError unless exactly one of them is given and it is not empty.
        """
        if messages is None:
            pieces: tuple[Piece, ...] = (piece_from(text, tokens=tokens),)
        elif text is None and tokens is None and messages:
            pieces = tuple(_message(message) for message in messages)
        else:
            raise InvalidRequestError("a root is a text, or messages, or tokens, and not empty", param="messages")
        return State(self.session, Node(input=pieces)).rules(rules)

    def state(self, *, rules: Rules | None = None) -> State:
        """An empty state, to add references and input to. `rules="strict"`: no mixing of the kinds of references."""
        return State(self.session, Node()).rules(rules)

    def scope(self) -> Scope:
        """`async with client.scope() as scope`: states that are made inside are released at its end."""
        return Scope(self.session)

    async def release(self, *states: State) -> None:
        """Give states up, all in one request. If it fails, it can be tried again."""
        for state in states:
            self.session.check_own(state.session)
        await self.session.release(*(state.node for state in states))

    # ------------------------------------------------------------ the server

    async def states(self) -> tuple[StateInfo, ...]:
        """All states on the server, other clients' included."""
        return (await self.session.get("states", StateList)).states

    async def stats(self) -> Stats:
        """Counts of states and of KV tokens on the server: this API key's, or, for the operator's key, everybody's."""
        return await self.session.get("stats", Stats)

    async def health(self) -> Health:
        """The server's versions and model; raises if it does not answer."""
        return await self.session.get("health", Health)


def _message(message: Mapping[str, str]) -> Piece:
    fields = cast("Mapping[str, object]", message)
    role, content = fields.get("role"), fields.get("content")
    if set(fields) != {"role", "content"} or not isinstance(role, str) or not isinstance(content, str):
        raise InvalidRequestError(
            'a message is {"role": ..., "content": ...}, both strings', param="messages", hint="text only, so far"
        )
    return piece_from(content, role=role)
