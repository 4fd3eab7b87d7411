"""The store's counts as Prometheus series `anabranch_*` on SGLang's /metrics, where `--enable-metrics` was given.

It measures nothing itself: it shows what the scheduler answers to each tick.
"""

from __future__ import annotations

from typing import Any

from anabranch import wire

CONDITIONS = {
    "running": "running",
    "waiting": "waiting",
    "evicted": "evicted_states",
}
TOKENS = ("held", "shared", "pinned", "reclaimable", "evicted")
EVENTS = ("created", "freed", "expired", "lost", "cancelled", "failed", "rejected", "evictions", "rebuilds")
_series: Series | None = None


class Series:
    """The series, and what the counters stood at when they were last shown."""

    def __init__(self) -> None:
        # SGLang sets up prometheus_client's multi-process mode, which must be before the first import.
        from prometheus_client import Counter, Gauge

        def gauge(name: str, text: str, labels: tuple[str, ...]) -> Any:
            return Gauge(f"anabranch_{name}", text, labels, multiprocess_mode="mostrecent")

        self.states = gauge("states", "States by condition.", ("tenant", "condition"))
        self.tokens = gauge("tokens", "KV tokens of states, by what can be said of them.", ("tenant", "kind"))
        self.pool = gauge("pool_tokens", "KV tokens of the whole pool, by use.", ("use",))
        self.events = {name: Counter(f"anabranch_{name}", f"States {name}.", ("tenant",)) for name in EVENTS}
        self.shown: dict[tuple[str, str], int] = {}

    def show(self, stats: wire.Stats) -> None:
        now = {one.tenant: one for one in stats.tenants}
        for tenant in {*now, *(tenant for tenant, _ in self.shown)}:
            counts = now.get(tenant) or wire.Counts()
            resident = counts.states - counts.evicted_states
            self.states.labels(tenant, "resident").set(resident)
            for condition, field in CONDITIONS.items():
                self.states.labels(tenant, condition).set(getattr(counts, field))
            for kind in TOKENS:
                self.tokens.labels(tenant, kind).set(getattr(counts, f"{kind}_tokens"))
            for name in EVENTS:
                value = getattr(counts, name)
                self.events[name].labels(tenant).inc(max(0, value - self.shown.get((tenant, name), 0)))
                self.shown[tenant, name] = max(value, self.shown.get((tenant, name), 0))
        for use in ("total", "free", "evictable", "held", "in_use"):
            self.pool.labels(use).set(getattr(stats, f"{use}_tokens") or 0)


def start() -> None:
    """Make the series; only where SGLang serves metrics."""
    global _series
    _series = _series or Series()


def wanted() -> bool:
    return _series is not None


def show(stats: wire.Stats) -> None:
    if _series is not None:
        _series.show(stats)
