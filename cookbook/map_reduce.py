"""Map and reduce: every text is read once and by itself, and the answer over all of them reads none of them again.

Not retrieval: all texts stay visible to the last step, through their states. Run it: python -m cookbook.map_reduce
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from anabranch import AsyncClient, Generation, State, render

TEXTS = Path(__file__).parent / "texts"
SYSTEM = "You summarize texts in one short sentence."
MAP = "{text}\n\nSummarize this text in one sentence."
REDUCE = "What do these {count} texts have in common? Answer in one sentence."


@dataclass(frozen=True, slots=True)
class Digest:
    """A summary of each text by name, and what was said about all of them."""

    summaries: Mapping[str, Generation[State]]
    answer: Generation[State]

    @property
    def reused_tokens(self) -> int:
        """Tokens whose keys and values existed already when a step needed them."""
        return sum(result.usage.reused_tokens for result in (*self.summaries.values(), self.answer))

    @property
    def computed_tokens(self) -> int:
        return sum(result.usage.computed_tokens for result in (*self.summaries.values(), self.answer))


def read_texts() -> dict[str, str]:
    """The passages that come with the recipes, by name."""
    return {path.stem: path.read_text().strip() for path in sorted(TEXTS.glob("*.txt"))}


async def run(client: AsyncClient, texts: Mapping[str, str], max_tokens: int = 32) -> Digest:
    """Summarize each text, all at the same time, then ask about all. The caller decides when states are released."""
    began = time.monotonic()

    def step(text: str) -> None:
        print(f"[{time.monotonic() - began:6.2f} s] {text}", flush=True)

    async def summarize(name: str, branch: State) -> Generation[State]:
        prompt = MAP.format(text=texts[name])
        result = await branch.generate(prompt, role="user", max_tokens=max_tokens, temperature=0)
        step(f"map: {name}, {result.usage.computed_tokens} tokens read")
        return result

    step("fork: one branch for each text")
    root = client.root(messages=[{"role": "system", "content": SYSTEM}])
    branches = await root.fork(len(texts))
    results = await asyncio.gather(*map(summarize, texts, branches))

    step("reduce: a state that inherits all of them, with every text and summary in its view")
    # Laid end to end, so that the model sees the texts after each other, as it would in one long prompt.
    joined = client.state().inherit(*(result.state for result in results)).place("concat")
    question = REDUCE.format(count=len(texts))
    answer = await joined.generate(question, role="user", max_tokens=max_tokens, temperature=0)
    step("done")
    return Digest(dict(zip(texts, results, strict=True)), answer)


async def main() -> None:
    async with AsyncClient() as client, client.scope():
        digest = await run(client, read_texts())
        print(f"\n{render.tree(digest.answer)}")
        for name, result in {**digest.summaries, "all together": digest.answer}.items():
            used = result.usage
            print(f"\n{name} (reused {used.reused_tokens}, computed {used.computed_tokens})")
            print(f"  {' '.join(result.text.split())}{' ...' if result.finish_reason == 'length' else ''}")
        print(f"\nIn total: {digest.reused_tokens} tokens reused, {digest.computed_tokens} computed")


if __name__ == "__main__":
    asyncio.run(main())
