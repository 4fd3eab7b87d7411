"""The page about compile times: tables and a plot, made from the numbers and from nothing else.

It measures nothing.
"""

from __future__ import annotations

from itertools import groupby
from math import log10
from pathlib import Path
from typing import Any

Numbers = dict[str, Any]
COLOURS = {"chains": "#0b6e99", "late forks": "#2e8b57", "tree": "#b8860b", "layers": "#a23b3b"}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 70, 150, 20, 50
LOW, HIGH = -2, 3  # powers of ten, milliseconds


def join_line(one: Numbers) -> str:
    return (
        f"join of {one['joined']}, {one['shape']:<10} {one['states']:>6} states {one['intervals']:>6} intervals: "
        f"{one['median_ms']:8.3f} ms (best {one['best_ms']:.3f}, processor {one['processor_median_ms']:.3f}, "
        f"cold {one['cold_ms']:.1f}), "
        f"walking up {one['baseline_median_ms']:8.3f} ms"
    )


def chain_line(chain: Numbers) -> str:
    times = ", ".join(f"{k}: {us:.1f}" for k, us in chain["median_us"].items())
    return f"k-th link of a chain, microseconds: {times}; last to first {chain['ratio']:.2f}"


def memory_line(one: Numbers) -> str:
    return (
        f"memory, {one['shape']:<8} {one['states']:>6} states, {one['intervals_per_state']:8.1f} intervals each: "
        f"{one['bytes_per_state']:7.0f} bytes a state, shelf {one['shelf_bytes'] / 2**20:.1f} MiB"
    )


def write(numbers: Numbers, folder: Path) -> None:
    """`compile.md` and `compile.svg`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compile.md").write_text(page(numbers))
    (folder / "compile.svg").write_text(plot(numbers["joins"]))


def page(numbers: Numbers) -> str:
    joins = [
        f"| {one['shape']} | {one['states']:,} | {one['intervals']:,} | {one['median_ms']:.2f} | {one['best_ms']:.2f} "
        f"| {one['processor_median_ms']:.2f} | {one['cold_ms']:.1f} | {one['baseline_median_ms']:.2f} "
        f"| {one['baseline_best_ms']:.2f} |"
        for one in numbers["joins"]
    ]
    memory = [
        f"| {one['shape']} | {one['states']:,} | {one['intervals_per_state']:,.0f} | {one['bytes_per_state']:,.0f} "
        f"| {one['shelf_bytes'] / 2**20:.1f} |"
        for one in numbers["memory"]
    ]
    chain = numbers["chain"]
    changes = ", with changes" if numbers["uncommitted_changes"] else ""
    return "\n".join([
        "# Compiling a context",
        "",
        "How long the server takes to find out what a new state sees, and what it keeps in memory for that. The",
        "baseline walks up through all ancestors, each time, and can do less: it knows neither spans nor policies.",
        "",
        "## Joining 64 states",
        "",
        "![Time of a join over the number of states](compile.svg)",
        "",
        "Milliseconds. *Processor*: without the time in which other programs had it. *Cold*: everything had been",
        "forgotten that can be written out again.",
        "",
        "| graph | states | visible intervals | median | best | processor, median | cold | baseline, median | best |",
        "|---|---|---|---|---|---|---|---|---|",
        *joins,
        "",
        "## The k-th link of a chain",
        "",
        "| " + " | ".join(["k", *chain["median_us"]]) + " |",
        "|---" * (1 + len(chain["median_us"])) + "|",
        "| " + " | ".join(["microseconds", *(f"{us:.1f}" for us in chain["median_us"].values())]) + " |",
        "",
        f"The last links of {chain['length']:,} take {chain['ratio']:.2f} times as long as the first "
        f"({chain['ratio_of_medians']:.2f} by medians).",
        "",
        "## Memory",
        "",
        "What the compiler allocates, without the KV and the tokens. The shelf holds what can be written out again; it",
        "has a fixed size for all states together.",
        "",
        "| graph | states | visible intervals, mean | bytes a state | shelf, MiB |",
        "|---|---|---|---|---|",
        *memory,
        "",
        "## Where",
        "",
        f"{numbers['cpu']}, {numbers['cores']} cores, load {numbers['load']:.1f} at the end; "
        f"Python {numbers['python']}, numpy {numbers['numpy']}; commit `{numbers['commit'][:12]}`{changes}. "
        f"Made by `{numbers['command']}`, and this page by `python -m benchmarks.compile report`.",
        "",
    ])  # fmt: skip


def plot(joins: list[Numbers]) -> str:
    """Time over number of states, both in powers of ten: our line drawn through, the baseline's dashed."""
    most = max(one["states"] for one in joins)

    def x(states: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (log10(states) - 2) / max(1.0, log10(most) - 2)

    def y(ms: float) -> float:
        power = min(max(log10(max(ms, 1e-9)), LOW), HIGH)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (power - LOW) / (HIGH - LOW)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]  # fmt: skip
    for power in range(LOW, HIGH + 1):
        at = y(10.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g} ms</text>')
    for states in sorted({one["states"] for one in joins}):
        parts.append(f'<text x="{x(states):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{states:,}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">states in the graph</text>'
    )
    for i, (shape, some) in enumerate(groupby(joins, key=lambda one: one["shape"])):
        points = list(some)
        colour = COLOURS.get(shape, "#555")
        for key, dash in (("median_ms", ""), ("baseline_median_ms", ' stroke-dasharray="5 4"')):
            line = " ".join(f"{x(one['states']):.1f},{y(one[key]):.1f}" for one in points)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 12}" y="{TOP + 16 + 18 * i}" fill="{colour}">{shape}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT + 12}" y="{TOP + 100}">dashed: walking up</text>')
    return "\n".join([*parts, "</svg>", ""])
