"""The numbers of a store, tenant by tenant: states by condition, tokens, events.

It only reads. Tenants that the operator did not name are counted together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from anabranch import wire
from anabranch_server.store import StateStore
from anabranch_server.tenancy import label

FIELDS = frozenset(wire.Counts.model_fields)


def counts_of(store: StateStore, tenant: str) -> Counter[str]:
    """The `wire.Counts` of one tenant."""
    return _grouped(store, lambda other: tenant if other == tenant else None)[tenant]


def counts_by_label(store: StateStore) -> dict[str, Counter[str]]:
    """The `wire.Counts` of all tenants, by the names under which they are shown."""
    return _grouped(store, label)


def _grouped(store: StateStore, group: Callable[[str], str | None]) -> dict[str, Counter[str]]:
    found: dict[str | None, Counter[str]] = defaultdict(Counter)
    for tenant, space in store.spaces.items():
        mine = found[group(tenant)]
        mine["states"] += len(space.states)
        mine["running"] += len(space.running)
        mine["waiting"] += len(space.waiting)
        mine["evicted_states"] += sum(state.segment.slots is None for state in space.states.values())
    for segment, holding in store.holdings.items():
        mine, tokens = found[group(segment.owner)], holding.keepers.total
        if segment.slots is None:
            mine["evicted_tokens"] += tokens
            continue
        mine["held_tokens"] += tokens
        mine["shared_tokens"] += holding.keepers.shared
        mine["pinned_tokens"] += tokens if holding.pins else 0
        mine["reclaimable_tokens"] += tokens if store.holdings.evictable(segment) else 0
    for (tenant, event), number in store.counts.items():
        if event in FIELDS:
            found[group(tenant)][event] += number
    return defaultdict(Counter, {name: counts for name, counts in found.items() if name is not None})
