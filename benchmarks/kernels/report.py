"""The page about kernels: tables and a plot, made from the numbers and from nothing else.

It measures nothing.
"""

from __future__ import annotations

from math import ceil, log2
from pathlib import Path
from typing import Any

from benchmarks.kernels.contenders import CONTENDERS, ON_DEMAND, OURS
from benchmarks.kernels.measure import LAYERS, POOL_SLOTS, SETS, SHAPE

Numbers = dict[str, Any]
COLOURS = {
    "tilelang": "#2e8b57", "fa3": "#a23b3b", "triton": "#b8860b", "flashinfer": "#7b4fa3",
    "cascade": "#c46aa8", "cuda-narrow": "#0b6e99", "cuda-wide": "#5fb3d4",
}  # fmt: skip
LABELS = {name: contender.label for name, contender in {**CONTENDERS, **ON_DEMAND}.items()}
ENDED = "all that follow"
WIDTH, LEFT, RIGHT, TOP, LINE = 760, 150, 150, 20, 30


class Results:
    """The numbers, looked up by workload and contender."""

    def __init__(self, numbers: Numbers) -> None:
        self.rate: float = numbers["copy_bytes_per_us"] or 1.0
        self.workloads: list[Numbers] = numbers["workloads"]
        self._found = {
            (one["workload"], one["contender"]): one for one in numbers["results"] if "single_us" in one
        }  # fmt: skip
        self.left_out = [
            (one["contender"], one.get("workload", ENDED), one.get("left_out") or one.get("ended"))
            for one in numbers["results"]
            if "single_us" not in one
        ]
        self.contenders = [name for name in LABELS if any(name == contender for _, contender in self._found)]

    def of(self, kind: str) -> list[Numbers]:
        return [one for one in self.workloads if one["kind"] == kind]

    def taking_part(self, kind: str) -> list[str]:
        names = {one["name"] for one in self.of(kind)}
        return [one for one in self.contenders if any((name, one) in self._found for name in names)]

    def found(self, workload: Numbers, contender: str) -> Numbers | None:
        return self._found.get((workload["name"], contender))

    def bound(self, workload: Numbers) -> float:
        """Microseconds in which the device copies as many bytes as the union has."""
        return workload["union_bytes"] / self.rate

    def best(self, workload: Numbers, *, ours: bool) -> float | None:
        times = [
            one["single_us"]
            for name in self.contenders
            if (name in OURS) == ours and (one := self.found(workload, name))
        ]
        return min(times, default=None)


def tell(contender: str, line: Numbers) -> None:
    """One line as it is measured."""
    if "single_us" in line:
        layer = f" layer {line['layer_us']:8.1f}" if "layer_us" in line else " " * 15
        error = f"error {line['out_error']:.1e}"
        print(
            f"{line['workload']:<34} {LABELS[contender]:<20} {line['single_us']:9.1f} us{layer}  {error} {line['way']}",
            flush=True,
        )
    elif "left_out" in line:
        print(f"{line['workload']:<34} {LABELS[contender]:<20} - {line['left_out']}", flush=True)


def table(numbers: Numbers) -> str:
    """All of one run, a line a workload: single and per layer, and as multiples of the bound."""
    results = Results(numbers)
    lines = [
        f"{'single / per layer, us':<36}{'bound':>8}" + "".join(f"{LABELS[n][:18]:>20}" for n in results.contenders)
    ]
    for workload in results.workloads:
        cells = [_cell(results.found(workload, name)) for name in results.contenders]
        bound = f"{results.bound(workload):8.1f}" if workload["kind"] == "decode" else f"{'-':>8}"
        lines.append(f"{workload['name']:<36}{bound}" + "".join(f"{cell:>20}" for cell in cells))
    lines.append("as multiples of the bound")
    for workload in results.of("decode"):
        cells = [_cell(results.found(workload, name), results.bound(workload)) for name in results.contenders]
        lines.append(f"{workload['name']:<36}{'':8}" + "".join(f"{cell:>20}" for cell in cells))
    for contender, workload, reason in results.left_out:
        lines.append(f"left out: {LABELS[contender]}, {workload}: {reason}")
    return "\n".join(lines)


def _cell(found: Numbers | None, unit: float = 1.0) -> str:
    if not found:
        return "-"
    digits = 1 if unit == 1.0 else 2
    times = [found["single_us"], found.get("layer_us")]
    return " / ".join(f"{time / unit:.{digits}f}" for time in times if time is not None)


def broken(numbers: Numbers) -> list[str]:
    """Which of our kernels gave a wrong result or never came to an end. One that is not installed is not broken."""
    return [
        f"{LABELS[contender]}, {workload}: {reason}"
        for contender, workload, reason in Results(numbers).left_out
        if contender in OURS and (workload == ENDED or "relative error" in (reason or ""))
    ]


def write(numbers: Numbers, folder: Path) -> None:
    """`kernels.md` and `kernels.svg`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernels.md").write_text(page(numbers))
    (folder / "kernels.svg").write_text(plot(numbers))


def page(numbers: Numbers) -> str:
    results = Results(numbers)
    changes = ", with changes" if numbers["uncommitted_changes"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in numbers["versions"].items())
    left_out = [
        f"| {LABELS[contender]} | {workload} | {(reason or '').replace('|', '/')} |"
        for contender, workload, reason in results.left_out
    ]
    return "\n".join([
        "# Attention kernels",
        "",
        f"One layer, {SHAPE.q_heads} query heads, {SHAPE.kv_heads} KV heads of {SHAPE.head_dim}, bf16, single slots at "
        "random.",
        "The *bound* is the time in which the device copies as many bytes as all requests together see, each token",
        "counted once; reading alone can be a little faster than copying. Others cannot shift what they read: they are",
        "given the same step without shifts, and all but the cascade read what is shared once for each request.",
        "",
        "## Decode",
        "",
        "![Time over the bound](kernels.svg)",
        "",
        "*Readers x shared + own tokens.* Microseconds for one call, and for one of six in a row, as in a model's",
        "layers; replayed from CUDA graphs, medians. What is read is not in the cache: three places in a pool of "
        f"{POOL_SLOTS * SHAPE.token_bytes / 1e9:.2f} GB",
        "take turns.",
        "",
        *_decode_table(results),
        "",
        "## Decode, as multiples of the bound",
        "",
        *_ratio_table(results),
        "",
        "## Prefill",
        "",
        "New tokens over a join of states. FA3 is given one plain context of equal length: once in the same single",
        "slots, as SGLang does it, and once with keys and values that lie in order without a page table.",
        "",
        *_prefill_table(results),
        *(["", "## Left out", "", "| kernel | workload | why |", "|---|---|---|", *left_out] if left_out else []),
        "",
        "## Where",
        "",
        f"{numbers['card']}, {numbers['multiprocessors']} multiprocessors, driver {numbers['driver']}, "
        f"copies {results.rate / 1e6:.2f} TB/s (read and written; {numbers['copy_spread']:.1%} between processes); "
        f"Python {numbers['python']}, {versions}; commit `{numbers['commit'][:12]}`{changes}. "
        f"{SETS} places, {LAYERS} calls in a row. "
        f"Made by `{numbers['command']}`, and this page by `python -m benchmarks.kernels report`.",
        "",
    ])  # fmt: skip


def _decode_table(results: Results) -> list[str]:
    names = results.taking_part("decode")
    lines = [
        "| workload | bound | " + " | ".join(LABELS[name] for name in names) + " | speed of our best over their best |"
    ]
    lines.append("|---" * (len(names) + 3) + "|")
    for workload in results.of("decode"):
        cells = [_cell(results.found(workload, name)) for name in names]
        ours, others = results.best(workload, ours=True), results.best(workload, ours=False)
        ratio = f"{others / ours:.2f}" if ours and others else "-"
        lines.append(f"| {workload['name']} | {results.bound(workload):.1f} | {' | '.join(cells)} | {ratio} |")
    return lines


def _ratio_table(results: Results) -> list[str]:
    names = results.taking_part("decode")
    lines = ["| workload | MB | " + " | ".join(LABELS[name] for name in names) + " |", "|---" * (len(names) + 2) + "|"]
    for workload in results.of("decode"):
        cells = [_cell(results.found(workload, name), results.bound(workload)) for name in names]
        lines.append(f"| {workload['name']} | {workload['union_bytes'] / 1e6:.0f} | {' | '.join(cells)} |")
    return lines


def _prefill_table(results: Results) -> list[str]:
    lines = ["| workload | kernel | microseconds | TFLOP/s | speed over FA3, same slots | over FA3, KV in order |"]
    lines.append("|---" * 6 + "|")
    for workload in results.of("prefill"):
        fa3 = [results.found(workload, name) for name in ("fa3", "fa3-contiguous")]
        for name in results.taking_part("prefill"):
            if found := results.found(workload, name):
                rate = flops(workload) / found["single_us"] / 1e6
                speeds = [f"{one['single_us'] / found['single_us']:.2f}" if one else "-" for one in fa3]
                lines.append(
                    f"| {workload['name']} | {LABELS[name]} | {found['single_us']:,.0f} | {rate:.0f} "
                    f"| {' | '.join(speeds)} |"
                )
    return lines


def flops(workload: Numbers) -> float:
    """Of both products, for one request whose new tokens see all before them and each other causally."""
    seen = workload["tokens_read_by_each"] - (workload["rows"] - 1) / 2
    return 4.0 * workload["rows"] * seen * SHAPE.q_heads * SHAPE.head_dim


def plot(numbers: Numbers) -> str:
    """A line a workload, a dot a kernel, further right the more times it takes the bound, in powers of two."""
    results = Results(numbers)
    names = [name for name in results.taking_part("decode") if name in COLOURS]
    rows = results.of("decode")
    ratios = {
        (workload["name"], name): found["single_us"] / results.bound(workload)
        for workload in rows
        for name in names
        if (found := results.found(workload, name))
    }
    powers = max(1, ceil(log2(max(ratios.values(), default=2.0))))
    height = TOP + LINE * max(len(rows), len(names)) + 60

    def x(ratio: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * log2(max(ratio, 1.0)) / powers

    bottom = TOP + LINE * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for power in range(powers + 1):
        at = x(2.0**power)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{2**power}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{bottom + 40}" text-anchor="middle">times the bound</text>'
    )
    for i, workload in enumerate(rows):
        y = TOP + LINE * (i + 0.5)
        parts.append(f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end">{workload["name"]}</text>')
        for name in names:
            if (ratio := ratios.get((workload["name"], name))) is not None:
                parts.append(f'<circle cx="{x(ratio):.1f}" cy="{y}" r="5" fill="{COLOURS[name]}" fill-opacity="0.8"/>')
    for i, name in enumerate(names):
        y = TOP + 16 + 20 * i
        parts.append(f'<circle cx="{WIDTH - RIGHT + 18}" cy="{y - 4}" r="5" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 30}" y="{y}">{LABELS[name]}</text>')
    return "\n".join([*parts, "</svg>", ""])
