"""The console command `anabranch`: looks at a server, and dispatches to the commands that other packages add.

It starts no server itself: `serve` and `model` are entry points of the group "anabranch.commands".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points

from anabranch import __version__
from anabranch.errors import AnabranchError
from anabranch.sync import Client

GROUP = "anabranch.commands"
ADDED = {
    "serve": "start a server (SGLang with anabranch)",
    "model": "fetch a small model (pull), say where it is (path)",
}
"""Commands that need `anabranch[server]`, and what they do."""
PER_TENANT = ("states", "running", "waiting", "held_tokens", "evicted_tokens", "expired", "failed", "rejected")
"""The counts that `stats` shows of every API key."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status (0 well, 1 failed, 2 wrong usage)."""
    args = list(sys.argv[1:] if argv is None else argv)
    added = {entry.name: entry for entry in entry_points(group=GROUP)}
    if args and (args[0] in added or args[0] in ADDED):
        # Everything after the name is the command's own business, --help included.
        return _dispatch(args[0], added.get(args[0]), args[1:])
    options = _parser([*ADDED, *(name for name in added if name not in ADDED)]).parse_args(args)
    try:
        with Client(options.base_url, api_key=options.api_key, timeout=options.timeout, max_retries=0) as client:
            options.show(client)
    except AnabranchError as error:
        print(f"anabranch: {error}", file=sys.stderr)
        return 1
    return 0


def _dispatch(name: str, entry: EntryPoint | None, args: list[str]) -> int:
    if entry is None:
        print(f"anabranch: the command {name!r} is not installed.\n  pip install 'anabranch[server]'", file=sys.stderr)
        return 1
    try:
        command: Callable[[list[str]], int] = entry.load()
    except ImportError as error:
        print(
            f"anabranch: {name!r} cannot start: {error}\n"
            "  It needs the server's packages: pip install 'anabranch[server]'",
            file=sys.stderr,
        )
        return 1
    return command(args)


def _parser(added: list[str]) -> argparse.ArgumentParser:
    more = "\n".join(f"  {name:<8}{ADDED.get(name, '')}" for name in added)
    parser = argparse.ArgumentParser(
        prog="anabranch",
        description="A DAG of LLM states that share their KV.",
        epilog=f"further commands (`anabranch COMMAND --help`):\n{more}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"anabranch {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, show, what in (
        ("ping", _ping, "ask a server whether it is well"),
        ("states", _states, "list the states on a server"),
        ("stats", _stats, "show a server's counts of states and tokens"),
    ):
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("--base-url", help="default: ANABRANCH_BASE_URL, else http://127.0.0.1:30000")
        command.add_argument("--api-key", help="default: ANABRANCH_API_KEY")
        command.add_argument("--timeout", type=float, default=10.0, help="seconds (default 10)")
        command.set_defaults(show=show)
    return parser


def _ping(client: Client) -> None:
    health = client.health()
    print(f"{client.inner.config.base_url}: {health.status}")
    for name in ("model", "version", "sglang_version", "attention_backend"):
        print(f"  {name:<18}{getattr(health, name)}")


def _states(client: Client) -> None:
    states = client.states()
    head = f"{'id':<34}{'status':<9}{'kv':<10}{'lease':>7}{'input':>8}{'generated':>11}{'context':>9}{'start':>8}"
    print(f"{head}{'refs':>6}")
    for one in states:
        kv = "-" if one.status != "sealed" else "resident" if one.resident else "evicted"
        lease = "-" if one.lease is None else f"{one.lease:.0f}s"
        print(
            f"{one.id:<34}{one.status:<9}{kv:<10}{lease:>7}{one.input_tokens:>8}{one.generated_tokens:>11}"
            f"{one.context_tokens:>9}{one.start:>8}{len(one.refs):>6}"
        )
    print(f"{len(states)} states")


def _stats(client: Client) -> None:
    stats = client.stats()
    for name, value in stats.model_dump(exclude={"tenants"}).items():
        print(f"{name:<20}{'-' if value is None else value:>12}")
    if stats.tenants:
        print()
        print(f"{'tenant':<20}" + "".join(f"{name:>{len(name) + 2}}" for name in PER_TENANT))
    for one in stats.tenants:
        print(f"{one.tenant:<20}" + "".join(f"{getattr(one, name):>{len(name) + 2}}" for name in PER_TENANT))


if __name__ == "__main__":
    sys.exit(main())
