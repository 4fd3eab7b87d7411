"""What a soak run counts: operations by kind and outcome, violations, latencies; and how it tells.

It decides nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

SHOWN = 20
"""Violations that are printed in full."""


@dataclass(slots=True)
class Tally:
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    checked: int = 0
    """States, and plain answers, that were computed again by brute force."""
    worst: float = 0.0

    def count(self, kind: str, outcome: str) -> None:
        self.outcomes[kind, outcome] += 1

    def violation(self, what: str) -> None:
        self.violations.append(what)
        if len(self.violations) <= SHOWN:
            print(f"VIOLATION {what}", flush=True)

    def percentile(self, share: float) -> float:
        """Milliseconds of plain requests."""
        ordered = sorted(self.plain)
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    def summary(self, operations: int, stats: dict[str, Any]) -> dict[str, Any]:
        seconds = time.monotonic() - self.began
        return {
            "operations": operations,
            "seconds": round(seconds, 1),
            "operations_per_second": round(operations / seconds, 1),
            "outcomes": {f"{kind}: {outcome}": n for (kind, outcome), n in sorted(self.outcomes.items())},
            "checked_by_brute_force": self.checked,
            "largest_logprob_difference": self.worst,
            "plain_p50_ms": round(self.percentile(0.5), 1),
            "plain_p99_ms": round(self.percentile(0.99), 1),
            "stats": {name: value for name, value in stats.items() if isinstance(value, int)},
            "violations": self.violations,
        }


def show(summary: dict[str, Any]) -> None:
    """Print a summary for people."""
    kinds: dict[str, list[str]] = {}
    for name, n in summary["outcomes"].items():
        kind, _, outcome = name.partition(": ")
        kinds.setdefault(kind, []).append(f"{n} {outcome}")
    for kind, outcomes in kinds.items():
        print(f"  {kind:<17}{', '.join(outcomes)}")
    stats = summary["stats"]
    names = ("created", "freed", "expired", "cancelled", "failed", "rejected", "evictions", "rebuilds")
    print(f"  server           {', '.join(f'{stats[name]} {name}' for name in names if name in stats)}")
    if "server_megabytes" in summary:
        first, last = summary["server_megabytes"]
        print(f"  server memory    {first} MB at first, {last} MB in the end")
    print(
        f"{summary['operations']} operations in {summary['seconds']} s, {summary['operations_per_second']} a second; "
        f"plain requests p50 {summary['plain_p50_ms']} ms, p99 {summary['plain_p99_ms']} ms; "
        f"{summary['checked_by_brute_force']} answers computed again, "
        f"largest logprob difference {summary['largest_logprob_difference']:.1e}; "
        f"{len(summary['violations'])} violations"
    )
