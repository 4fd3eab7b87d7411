"""The soak run against the real server, as CI does it: one seed, 3,000 operations.

`SOAK_SEED=5 pytest tests/soak/test_soak.py` runs another seed; longer runs and other servers are scripts/soak's.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .rounds import Options
from .run import Setting, replay, soak

SEED = int(os.environ.get("SOAK_SEED", "0"))
OPERATIONS = 3000


@pytest.mark.engine
@pytest.mark.parametrize("seed", [SEED], ids=lambda seed: f"seed{seed}")
def test_random_operations_leave_nothing_wrong(seed: int, tmp_path: Path):
    options, setting = Options(seed=seed, operations=OPERATIONS), Setting()
    summary = soak(options, setting, tmp_path)
    if summary["violations"]:
        pytest.fail("\n".join([*summary["violations"], f"again: {replay(options, setting)}"]), pytrace=False)
    assert summary["operations"] == OPERATIONS and summary["checked_by_brute_force"] > 20
