"""The correctness suite under pytest, where there is a card. `python -m tests.gpu` does the same without pytest.

The cases and what is asked are in `suite.py`.
"""

from __future__ import annotations

import pytest

from .__main__ import KERNELS, SECONDS, verdicts


@pytest.mark.gpu
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("kernel", KERNELS.split(","))
def test_kernel_gives_what_attention_is(kernel: str):
    found = verdicts(kernel, [], SECONDS)
    assert found["summary"], found["ended"]
    assert not found["faults"]
    assert found["summary"]["tried"] > 200, "most cases are for every kernel"
