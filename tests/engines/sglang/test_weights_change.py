"""Weights that change in place: nothing of the old ones is loaded, and the other engines keep their pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engines.sglang.conftest import PAGE, TINY, Three, forget, pages_of, prompt, until_hit
from tokenlake_testing.tiny_model import save_tiny_model

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

TOKENS = prompt(1000, 50)


def test_an_update_from_disk(engines: Three, tmp_path: Path) -> None:
    old = engines.expected(1000, 50)
    until_hit(engines.first, TOKENS, old, pages_of(TOKENS) * PAGE)
    other = save_tiny_model(tmp_path / "other", replace(TINY, seed=1))
    assert engines.plain.call("update", model=str(other))
    new = engines.plain.generate([TOKENS])[0]
    assert new != old
    assert engines.first.call("update", model=str(other))
    answer = engines.first.timed([TOKENS])
    assert (answer.tokens[0], answer.cached) == (new, 0)
    # The engine finds its own new pages, and the other one the old pages.
    until_hit(engines.first, TOKENS, new, pages_of(TOKENS) * PAGE)
    until_hit(engines.second, TOKENS, old, pages_of(TOKENS) * PAGE)


def test_without_emptying_the_caches_the_pool_is_not_used(engines: Three, model: Path) -> None:
    forget(engines.second)
    assert engines.second.call("update", model=str(model), flush=False)
    answer = engines.second.timed([TOKENS])
    assert answer.cached == 0
    forget(engines.second)
    until_hit(engines.second, TOKENS, answer.tokens[0], pages_of(TOKENS) * PAGE)
