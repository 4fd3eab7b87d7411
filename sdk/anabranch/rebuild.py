"""States that the server lost are made again: which of them, in which order, each once.

It sends nothing itself and does not decide whether to: see `on_lost` in `session.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from anabranch.graph import Node, context, order
from anabranch.lease import renew
from anabranch.standing import Standing

if TYPE_CHECKING:
    from anabranch.session import Session


async def rebuild(session: Session, node: Node) -> None:
    """Make again what was lost and `node` needs: itself, if it was on the server, and what it references.

    One rebuild after the other: whoever waits for it finds everything made. A released state is made again only if a
    lost one cannot be computed without it, and is given up again after that.
    """
    async with session.rebuilding:
        there = (Standing.ON_SERVER, Standing.LOST)
        await renew(session, (one for one in order(node) if one.owns_tokens and session.record(one).standing in there))
        needed = missing(session, node)
        try:
            await _make(session, needed)
        finally:
            await session.give_up([one for one in needed if session.record(one).standing is Standing.RELEASED])


def missing(session: Session, node: Node) -> list[Node]:
    """What must be made again before `node` can be used, or made; every state after those that it references."""
    found: set[Node] = set()
    seen: set[Node] = set()
    stack = [node]
    while stack:
        one = stack.pop()
        if one in seen or session.record(one).standing is Standing.ON_SERVER:
            continue
        seen.add(one)
        targets = context(one).targets
        if session.record(one).standing in (Standing.LOST, Standing.RELEASED):
            found.add(one)
        else:  # it is made as usual, and nothing is made from a released state
            targets = [target for target in targets if session.record(target).standing is not Standing.RELEASED]
        stack.extend(targets)
    return [one for one in order(node) if one in found]


async def _make(session: Session, nodes: Iterable[Node]) -> None:
    """Each as soon as what it references is made. All are tried, then the first error is raised."""
    tasks: dict[Node, asyncio.Task[None]] = {}

    async def make(node: Node) -> None:
        await asyncio.gather(*(tasks[one] for one in context(node).targets if one in tasks))
        await session.make_again(node)

    for node in nodes:
        tasks[node] = asyncio.create_task(make(node))
    for result in await asyncio.gather(*tasks.values(), return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
