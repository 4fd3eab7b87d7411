"""Runs a program against a server that is up: workers carry operations out, and every so often all comes to rest.

It starts and stops no server; run.py does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.oracle.llama import Llama

from .actions import Actions
from .calls import DEADLINE, Calls
from .judge import Judge
from .operations import Operation, program
from .settling import Settling
from .tally import Tally
from .world import World

CROWDED = 0.5
"""Share of the pool that must be spoken for before a request may be refused for want of room."""
PROGRESS_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Options:
    """`keys` are the tenants' API keys, `operator` the one that may see and stop everything."""

    seed: int = 0
    operations: int = 3000
    workers: int = 12
    every: int = 500
    without: frozenset[str] = frozenset()
    keys: tuple[str, ...] = ("k1", "k2", "k3")
    operator: str | None = None

    def has(self, name: str) -> bool:
        return name not in self.without


@dataclass(slots=True)
class Soak:
    """One run. `faults` is asked at every rest for what is wrong with the server's process or log."""

    options: Options
    exact: Llama
    rough: Llama
    faults: Callable[[], str | None] = lambda: None
    transport: httpx.AsyncBaseTransport | None = None
    tally: Tally = field(default_factory=Tally)
    done: int = 0

    @classmethod
    def of(cls, options: Options, model_dir: Path, faults: Callable[[], str | None]) -> Soak:
        torch.set_num_threads(1)
        return cls(options, Llama.load(model_dir, torch.float64), Llama.load(model_dir), faults)

    async def run(self, url: str) -> dict[str, Any]:
        """Carry the program out, up to the first rest at which something is found to be wrong; returns the summary."""
        limits = httpx.Limits(max_connections=512, keepalive_expiry=2)  # the server itself hangs up after 5
        timeout = httpx.Timeout(2 * DEADLINE)
        stats: dict[str, Any] = {}
        async with httpx.AsyncClient(limits=limits, timeout=timeout, transport=self.transport) as http:
            calls = Calls(url, http, self.options.operator)
            progress = None
            try:
                stats = await calls.stats()
                actions = self._actions(calls, stats["total_tokens"])
                progress = asyncio.create_task(self._tell(actions.world))
                stats = await self._rounds(Settling(actions, self.exact, self.rough))
            except (AssertionError, httpx.HTTPError) as error:
                self.tally.violation(str(error) or repr(error))
            finally:
                if progress is not None:
                    progress.cancel()
        if fault := self.faults():
            self.tally.violation(fault)
        return self.tally.summary(self.done, stats)

    def _actions(self, calls: Calls, pool: int) -> Actions:
        options = self.options
        world = World(crowd=int(CROWDED * pool))
        keys = options.keys if options.has("tenancy") else (None,)
        return Actions(calls, world, Judge(world, options.has), self.tally, pool, keys)

    async def _rounds(self, settling: Settling) -> dict[str, Any]:
        todo = islice(program(self.options.seed, self.options.without), self.options.operations)
        while batch := [*islice(todo, self.options.every)]:
            operations = iter(batch)
            await asyncio.gather(*(self._work(settling.actions, operations) for _ in range(self.options.workers)))
            if self.tally.violations or self.faults():
                return {}
            await settling.settle(batch[-1])
        return await settling.finish()

    async def _work(self, actions: Actions, operations: Iterator[Operation]) -> None:
        for operation in operations:
            if self.tally.violations:
                return
            try:
                await actions.carry_out(operation)
            except (AssertionError, httpx.HTTPError) as error:
                told = str(error) if isinstance(error, AssertionError) else repr(error)
                self.tally.violation(f"in operation {operation.index} ({operation.kind}): {told}")
            self.done += 1

    async def _tell(self, world: World) -> None:
        last, at = 0, time.monotonic()
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            now = time.monotonic()
            speed, last, at = (self.done - last) / (now - at), self.done, now
            print(
                f"{self.done:>7} of {self.options.operations}  {speed:5.1f}/s  {len(world.states)} states, "
                f"{world.tokens} tokens  plain p50 {self.tally.percentile(0.5):.0f} ms  "
                f"{self.tally.checked} checked  {len(self.tally.violations)} violations",
                flush=True,
            )
