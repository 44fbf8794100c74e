"""The table of known models says what the pool stores of each."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from tokenlake.opaque_layout import OpaqueLayout
from tokenlake_client.engines.vllm.known.ranks import rank_shards
from tokenlake_server.start.config_command import config
from tokenlake_server.start.models import COLUMNS, MODELS, RANKS, ModelCache, rows

GIB = 1 << 30
BY_NAME = {model.name: model for model in MODELS}
each_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
each_size = pytest.mark.parametrize("ranks", RANKS)


def printed(*arguments: str) -> list[str]:
    result = CliRunner().invoke(config, ["models", *arguments])
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_the_command_prints_a_line_per_model_in_80_columns() -> None:
    lines = printed("--memory", "1GiB")
    assert len(lines) == 2 + len(MODELS)
    assert max(map(len, lines)) <= 80
    assert [line.split("  ")[0] for line in lines[2:]] == list(BY_NAME)


def test_the_command_takes_the_memory_of_the_settings() -> None:
    assert "64 GiB" in printed("--memory", "64GiB")[0]
    assert printed("--memory", "64GiB") != printed("--memory", "1GiB")


@each_model
@each_size
def test_each_layout_is_one_that_a_daemon_accepts(model: ModelCache, ranks: int) -> None:
    model.layout(ranks).check()


@each_model
@each_size
def test_a_ranks_bytes_are_those_that_the_connector_reads(model: ModelCache, ranks: int) -> None:
    layout = model.layout(ranks)
    if isinstance(layout, OpaqueLayout) or layout.latent:
        assert model.rank_bytes(ranks) * layout.shards == layout.segment_bytes
    else:
        own = rank_shards(layout, 0, ranks)
        assert model.rank_bytes(ranks) == (own.stop - own.first) * layout.shard_bytes


@pytest.mark.parametrize(
    ("name", "mib", "tokens"),
    [
        # By hand: layers x 2 x KV heads x head dimension x bytes x 256 tokens.
        ("Llama-3.1-8B", "32.0", "8,192"),
        ("Llama-3.1-8B fp8", "16.0", "16,384"),
        ("Qwen3-235B-A22B", "47.0", "5,577"),
        # 61 layers of 576 elements.
        ("DeepSeek-V3", "17.2", "15,279"),
        # 10 of its 62 layers have full attention.
        ("Gemma-3-27B", "20.0", "13,107"),
    ],
)
def test_sizes_that_were_computed_by_hand(name: str, mib: str, tokens: str) -> None:
    cells = dict(zip(COLUMNS, next(row for row in rows(GIB) if row[0] == name), strict=True))
    assert (cells["MiB"], cells["tokens/GiB"]) == (mib, tokens)


@pytest.mark.parametrize(
    ("name", "groups", "segments"), [("Qwen3-8B", 1, 0), ("Gemma-3-27B", 7, 6 * 4), ("gpt-oss-20b", 2, 1)]
)
def test_only_the_last_window_of_a_prompt_is_stored(name: str, groups: int, segments: int) -> None:
    assert (BY_NAME[name].groups, BY_NAME[name].prompt_segments) == (groups, segments)


def test_64_gib_hold_500_000_tokens_of_an_8b_model() -> None:
    """As `docs/architecture.md` says."""
    cells = dict(zip(COLUMNS, next(row for row in rows(64 * GIB) if row[0] == "Llama-3.1-8B"), strict=True))
    assert 64 * int(cells["tokens/GiB"].replace(",", "")) * float(cells["used"].rstrip("%")) / 100 > 500_000
