"""A state of other weights is readable by nobody: refused before execution, over HTTP and SDK.

Adapters: tests/life/test_cases_adapters.py.
"""

from __future__ import annotations

import pytest

from anabranch import AsyncClient, StateIncompatibleError
from tests.engine.api import body, error, inherit, ok, send
from tests.serving import Served

pytestmark = pytest.mark.engine


async def test_a_state_of_the_weights_before_an_update_is_refused(stepped: Served):
    async with AsyncClient(stepped.url) as client:
        mine = (await client.root("Hello").generate(max_tokens=1)).state
        before = ok(stepped, text="Hello", n=1)
        update = stepped.post("/update_weights_from_disk", model_path=stepped.model_dir, flush_cache=False)
        assert update.status_code == 200, update.text
        found = error(send(stepped, **body([inherit(before.id)], "x", 1)))
        assert found.code == "state_incompatible"
        assert "weights_version" in found.message
        with pytest.raises(StateIncompatibleError):
            await mine.generate("x")
        after = ok(stepped, text="Hello", n=1)
        assert ok(stepped, [inherit(after.id)], "x", 1).usage.reused_tokens == after.usage.computed_tokens + 1
