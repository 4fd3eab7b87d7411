"""A client that knows nothing of states: plain requests, one after the other, in a process of its own.

`python -m tests.hostile.bystander URL WORKERS` goes on until its input ends, then prints what it measured as JSON: for
each request the seconds that the client saw, and those that the server says it took.
"""

from __future__ import annotations

import json
import sys
import threading
import time

import httpx

NEW = 2


def plain(client: httpx.Client, text: str) -> tuple[float, float]:
    began = time.monotonic()
    sampling = {"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True}
    answer = client.post("/generate", json={"text": text, "sampling_params": sampling})
    assert answer.status_code == 200 and answer.json()["meta_info"]["completion_tokens"] == NEW, answer.text
    return time.monotonic() - began, answer.json()["meta_info"]["e2e_latency"]


def main(url: str, workers: int) -> None:
    found: list[tuple[float, float]] = []
    over = threading.Event()

    def work(number: int) -> None:
        with httpx.Client(base_url=url, timeout=120) as client:
            while not over.is_set():
                found.append(plain(client, f"plain {number} {len(found)}"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    over.set()
    for thread in threads:
        thread.join()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
