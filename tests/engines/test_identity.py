"""A loaded model has its directory's digest until one bit differs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines.models import FAMILIES, LLAMA, build, family
from tokenlake_client.engines.transformers import identity
from tokenlake_client.engines.transformers.identity import weights_digest_of
from tokenlake_client.weights import digest_of_directory


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A saved model."""
    family("llama-gqa").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(directory: Path, **settings: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, **settings)


@contextmanager
def edited(tensor: Any, at: int, value: float | None = None) -> Iterator[None]:
    """Change one element to `value`, or by one bit."""
    flat = tensor.detach().view(-1)
    former = flat[at].clone()
    if value is None:
        flat.view(torch.int32 if tensor.element_size() == 4 else torch.int16)[at] ^= 1
    else:
        flat[at] = value
    yield
    flat[at] = former


def test_a_loaded_model_has_its_directorys_digest(directory: Path, tmp_path: Path) -> None:
    digest = digest_of_directory(directory)
    load(directory).save_pretrained(tmp_path / "copy")
    for place in (directory, tmp_path / "copy"):
        assert weights_digest_of(load(place)) == digest
    for settings in ({"attn_implementation": "eager"}, {"dtype": torch.bfloat16}):
        assert weights_digest_of(load(directory, **settings)) == digest
    assert weights_digest_of(load(directory, rms_norm_eps=0.5)) != digest


@pytest.mark.parametrize("name", ["gpt2", "opt", "gptj", "qwen3"])
def test_other_families_have_their_directorys_digest(tmp_path: Path, name: str) -> None:
    family(name).save_pretrained(tmp_path / name)
    assert weights_digest_of(load(tmp_path / name)) == digest_of_directory(tmp_path / name)


def test_several_files_and_a_narrower_dtype_in_them(tmp_path: Path) -> None:
    family("llama-gqa", torch.bfloat16).save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    digest = digest_of_directory(tmp_path / "model")
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        model = load(tmp_path / "model", dtype=dtype)
        assert weights_digest_of(model) == digest
        with edited(model.lm_head.weight, 1000):
            assert weights_digest_of(model) != digest


def test_one_bit_of_any_element_is_found(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "PIECE", 100)
    digest = digest_of_directory(directory)
    model = load(directory)
    draw = random.Random(3)
    for name, tensor in model.state_dict().items():
        count = tensor.numel()
        for at in {0, count // 2, count - 1, min(99, count - 1), min(100, count - 1), draw.randrange(count)}:
            with edited(tensor, at):
                assert weights_digest_of(model) != digest, (name, at)
    assert weights_digest_of(model) == digest


def test_one_row_of_the_embeddings_in_the_middle_is_found(directory: Path) -> None:
    model = load(directory)
    with torch.no_grad():
        model.model.embed_tokens.weight[97] *= 3
    changed = weights_digest_of(model)
    assert changed not in ("", digest_of_directory(directory))
    assert weights_digest_of(model) == changed


def test_numbers_that_compare_strangely(tmp_path: Path) -> None:
    model = family("llama-gqa")
    weight = model.model.embed_tokens.weight
    with edited(weight, 5, float("nan")), edited(weight, 6, 0.0):
        model.save_pretrained(tmp_path / "model")
    digest = digest_of_directory(tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert weights_digest_of(loaded) == digest, "a NaN keeps its bits"
    with edited(loaded.model.embed_tokens.weight, 6, -0.0):
        assert weights_digest_of(loaded) != digest


def test_tied_weights_that_were_untied_are_found(tmp_path: Path) -> None:
    settings = {**LLAMA, "tie_word_embeddings": True}
    build(*FAMILIES["llama-gqa"][:2], settings).save_pretrained(tmp_path / "model")
    digest = digest_of_directory(tmp_path / "model")
    model = load(tmp_path / "model")
    assert weights_digest_of(model) == digest
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 3)
    assert weights_digest_of(model) != digest
