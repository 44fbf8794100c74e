"""With the connector, vLLM starts every model that it starts without it. For a model that the pool does not serve, it
logs the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.conftest import PATIENT, TINY, prompt
from tests.engines.vllm.forked import ForkedEngine, answers, refusals
from tokenlake.errors import Unreachable
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import transfer_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

PROMPTS = [prompt(700, 1), prompt(300, 2)]
COMMON = {
    "vocab_size": TINY.vocabulary,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MIXED = {
    **COMMON,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "sliding_window": 256,
    "layer_types": ["sliding_attention", "full_attention"],
}
HYBRID = {
    **COMMON,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
LATENT = {
    **COMMON,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
}
GUESSING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}

FAMILIES: dict[str, tuple[str, dict[str, Any] | None, dict[str, Any], str]] = {
    "hybrid": ("Qwen3Next", HYBRID, {"dtype": "bfloat16"}, "groups of layers with FullAttentionSpec, MambaSpec"),
    "mixed": ("Gemma3", MIXED, {}, "groups of layers with FullAttentionSpec, SlidingWindowSpec"),
    "latent": ("DeepseekV2", LATENT, {}, "latent attention"),
    "speculative": ("Llama", None, {"speculative_config": GUESSING}, "'speculative_config' is set"),
}
"""Family in transformers, its settings (None: the model of the other tests), vLLM's arguments, the logged reason."""


def save(directory: Path, family: str, settings: dict[str, Any]) -> Path:
    """A model of a family of transformers, with seeded weights large enough that tokens depend on the context."""
    import torch
    import transformers

    config = getattr(transformers, f"{family.replace('Gemma3', 'Gemma3Text')}Config")(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        network: Any = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float32).eval()
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0, 0.15)
    network.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", FAMILIES)
def test_an_unserved_model_runs_as_without_the_connector(
    name: str, model: Path, cluster: Cluster, tmp_path: Path
) -> None:
    family, settings, arguments, reason = FAMILIES[name]
    directory = save(tmp_path / "model", family, settings) if settings is not None else model
    pool = {"socket": str(cluster.nodes[0].socket), **PATIENT}
    without = ForkedEngine(directory, tmp_path / "without.log", **arguments)
    beside = ForkedEngine(directory, tmp_path / "beside.log", pool, **arguments)
    expected = answers(without, PROMPTS)
    assert answers(beside, PROMPTS) == expected
    assert len({token for answer in expected[0] for token in answer}) > 4, "the model repeats itself"
    (said,) = refusals(beside)
    assert reason in said
    assert refusals(without) == []


def within(cluster: Cluster) -> list[dict[str, Any]]:
    """The settings of a `MultiConnector` with our connector alone, which verifies its reads."""
    return [{"socket": str(cluster.nodes[0].socket), "verify": True, **PATIENT}]


def test_a_wrapper_without_the_policy_is_refused(model: Path, cluster: Cluster, tmp_path: Path) -> None:
    refused = ForkedEngine(model, tmp_path / "refused.log", within(cluster))
    # The line within "connectors" does not reach vLLM's scheduler.
    (misplaced,) = transfer_of(within(cluster))["kv_connector_extra_config"]["connectors"]
    misplaced["kv_load_failure_policy"] = "recompute"
    extra = {"kv_connector_extra_config": {"connectors": [misplaced]}}
    refused_too = ForkedEngine(model, tmp_path / "misplaced.log", within(cluster), transfer=extra)
    for engine in (refused, refused_too):
        with pytest.raises(Unreachable, match="setting 'kv_load_failure_policy' is 'fail'") as raised:
            answers(engine, PROMPTS)
        assert 'Add "kv_load_failure_policy": "recompute" to --kv-transfer-config' in str(raised.value)


def test_an_unserved_model_needs_no_policy(model: Path, cluster: Cluster, tmp_path: Path) -> None:
    engine = ForkedEngine(model, tmp_path / "log", within(cluster), speculative_config=GUESSING)
    assert len(answers(engine, PROMPTS)) == 2
    assert len(refusals(engine)) == 1
