"""Fork and join: one question, two advocates who do not hear each other, and a verdict that has heard both.

Not a debate: neither side sees the other. Run it: python -m cookbook.hello_fork (ANABRANCH_BASE_URL).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from anabranch import AsyncClient, Generation, State, render

SYSTEM = "You are a town planner. You answer in one or two short sentences."
QUESTION = "A town of 20,000 people may build a tram line."
FOR = "Name the best argument for the tram."
AGAINST = "Name the best argument against the tram."
VERDICT = "Weigh both arguments. Should the town build the tram? Answer in one sentence."


@dataclass(frozen=True, slots=True)
class Debate:
    """The two arguments and the verdict, each with the state that it left on the server."""

    pro: Generation[State]
    con: Generation[State]
    verdict: Generation[State]


async def run(client: AsyncClient, max_tokens: int = 40) -> Debate:
    """Ask, argue both ways at once, and weigh. The caller decides when the states are released."""
    step = stepper()
    root = client.root(messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}])
    step("fork: the question is computed once")
    pro, con = await root.fork(2)

    step("both sides argue at the same time, over the same question")
    p, c = await asyncio.gather(
        pro.generate(FOR, role="user", max_tokens=max_tokens, temperature=0),
        con.generate(AGAINST, role="user", max_tokens=max_tokens, temperature=0),
    )

    step("join: the verdict sees both sides, and nothing of them is computed again")
    joined = client.state().inherit(p.state, c.state)
    verdict = await joined.generate(VERDICT, role="user", max_tokens=max_tokens, temperature=0)
    step("done")
    return Debate(p, c, verdict)


def stepper() -> Callable[[str], None]:
    """A function that prints a line with the seconds since now."""
    began = time.monotonic()
    return lambda text: print(f"[{time.monotonic() - began:6.2f} s] {text}", flush=True)


def report(name: str, result: Generation[State]) -> str:
    """One answer, and how many of the tokens that it needed existed already."""
    used = result.usage
    return (
        f"\n{name} (reused {used.reused_tokens}, computed {used.computed_tokens}, generated {used.generated_tokens})"
        f"\n  {' '.join(result.text.split())}{' ...' if result.finish_reason == 'length' else ''}"
    )


async def main() -> None:
    async with AsyncClient() as client, client.scope():
        debate = await run(client)
        print(f"\n{render.tree(debate.verdict)}")
        print(report("For", debate.pro), report("Against", debate.con), report("Verdict", debate.verdict))


if __name__ == "__main__":
    asyncio.run(main())
