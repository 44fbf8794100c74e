"""The identity of SGLang's pages: every fact that gives their bytes a meaning changes the layout, and engines that the
pool cannot serve are refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines.hicache import Config, HostPool
from tokenlake.errors import LayoutRefused
from tokenlake_client.engines.common.page_settings import PageSettings
from tokenlake_client.engines.sglang.hits import SidePool, needed, restorable
from tokenlake_client.engines.sglang.identity import (
    CACHE_SETTINGS,
    MODEL_SETTINGS,
    REFUSED,
    EngineFacts,
    group_of,
    layout_of,
    pool_facts,
    weights_digest_of,
)

SETTINGS = PageSettings()


@pytest.fixture
def facts(tmp_path: Path) -> EngineFacts:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Llama"]}))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    names = (*MODEL_SETTINGS, *CACHE_SETTINGS, *REFUSED)
    values: dict[str, Any] = dict.fromkeys(names)
    return EngineFacts("sglang 1", str(tmp_path), None, None, "auto", False, None, None, values)


def fingerprint(facts: EngineFacts, settings: PageSettings = SETTINGS) -> bytes:
    pool = pool_facts("kv", HostPool(), Config(), part_bytes=(64, 32))
    return bytes(layout_of(facts, pool, weights_digest_of(facts, settings), settings).fingerprint())


@pytest.mark.parametrize("name", [*MODEL_SETTINGS, *CACHE_SETTINGS])
def test_every_setting_is_part_of_the_identity(facts: EngineFacts, name: str) -> None:
    assert fingerprint(replace(facts, values={**facts.values, name: "other"})) != fingerprint(facts)


def test_weights_are_part_of_the_identity(facts: EngineFacts) -> None:
    before = fingerprint(facts)
    Path(facts.model, "model.safetensors").write_bytes(b"WEIGHTS")
    assert fingerprint(facts) != before
    Path(facts.model, "model.safetensors").write_bytes(b"weights")
    assert fingerprint(facts) == before
    assert fingerprint(replace(facts, engine="sglang 2")) != before


def test_the_same_files_in_another_place_share(facts: EngineFacts, tmp_path: Path) -> None:
    other = tmp_path / "copies" / Path(facts.model).name
    other.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (other / name).write_bytes(Path(facts.model, name).read_bytes())
    assert fingerprint(replace(facts, model=str(other))) == fingerprint(facts)


def test_a_draft_model_is_part_of_the_identity(facts: EngineFacts, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    (draft / "model.safetensors").write_bytes(b"draft")
    first = fingerprint(replace(facts, draft=str(draft)))
    (draft / "model.safetensors").write_bytes(b"DRAFT")
    assert len({fingerprint(facts), first, fingerprint(replace(facts, draft=str(draft)))}) == 3


def test_a_name_for_the_weights_replaces_their_digest(facts: EngineFacts) -> None:
    named = PageSettings(weights_digest="mine")
    elsewhere = replace(facts, load_format="dummy")
    assert fingerprint(facts, named) == fingerprint(elsewhere, named)
    quantised = replace(facts, values={**facts.values, "quantization": "fp8"})
    assert weights_digest_of(quantised, named) != weights_digest_of(facts, named)


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_the_pool_cannot_serve(facts: EngineFacts, name: str) -> None:
    with pytest.raises(LayoutRefused, match=name):
        fingerprint(replace(facts, values={**facts.values, name: "on"}))


def test_engines_that_the_pool_cannot_serve(facts: EngineFacts) -> None:
    with pytest.raises(LayoutRefused, match="images"):
        fingerprint(replace(facts, multimodal=True))
    with pytest.raises(LayoutRefused, match="load_format"):
        fingerprint(replace(facts, load_format="dummy"))
    with pytest.raises(LayoutRefused, match="local cache"):
        fingerprint(replace(facts, model="nobody/no-such-model"))


def test_cache_pools_have_numbers_of_their_own() -> None:
    names = ("kv", "mamba", "swa", "draft", "indexer")
    assert len({group_of(name) for name in names}) == len(names)


def test_prefixes_that_several_pools_restore() -> None:
    window = SidePool("swa", [False, True, True, False, True, True], 2)
    whole = SidePool("indexer", [True, True, True, True, True, False], 0)
    assert restorable(6, []) == ([1, 2, 3, 4, 5, 6], {})
    assert restorable(6, [window]) == ([3, 6], {"swa": 6})
    assert restorable(6, [window, whole]) == ([3], {"swa": 6, "indexer": 5})
    assert restorable(2, [SidePool("swa", [True, True], 4)]) == ([1, 2], {"swa": 2})
    assert restorable(3, [SidePool("mamba", [False] * 3, 1)]) == ([], {})
    assert (needed(window, 6), needed(window, 1), needed(whole, 3)) == (range(4, 6), range(0, 1), range(0, 3))
