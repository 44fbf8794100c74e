"""Engines whose weights or effective configuration differ share no segments: real vLLM configurations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM
from vllm.config import CacheConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVQuantMode

from tests.engines.vllm.conftest import TINY
from tokenlake.errors import LayoutRefused
from tokenlake.layout import Layout
from tokenlake_client.engines.vllm.adapters import directory_of
from tokenlake_client.engines.vllm.known.identity import layout_of
from tokenlake_client.engines.vllm.settings import read_settings
from tokenlake_client.weights import digest_of_directory
from tokenlake_testing.families import save_pictures, save_quantised

pytestmark = pytest.mark.timeout(300)


FP8 = KVQuantMode.FP8_PER_TENSOR


def configured(model: Path, **arguments: Any) -> VllmConfig:
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 2048, "enforce_eager": True, **arguments}
    return EngineArgs(model=str(model), **{"skip_tokenizer_init": True, **settings}).create_engine_config()


def layout(
    model: Path, weights_digest: str | None = None, mode: KVQuantMode = KVQuantMode.NONE, **arguments: Any
) -> Layout:
    """The layout that the connector of an engine with these arguments finds. `mode`: the quantisation of its cache."""
    config = configured(model, **arguments)
    dtype = torch.float32 if mode is KVQuantMode.NONE else torch.uint8
    spec = FullAttentionSpec(block_size=128, num_kv_heads=TINY.kv_heads, head_size=32, dtype=dtype, kv_quant_mode=mode)
    groups = [KVCacheGroupSpec([f"layer.{number}" for number in range(TINY.layers)], spec)]
    cached = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)
    extra = {} if weights_digest is None else {"weights_digest": weights_digest}
    return layout_of(config, cached, read_settings(extra, {}))


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_quantised(tmp_path_factory.mktemp("quantised"), TINY)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a mixture of experts."""
    directory = tmp_path_factory.mktemp("experts")
    config = MixtralConfig(
        vocab_size=TINY.vocabulary,
        hidden_size=TINY.hidden,
        intermediate_size=64,
        num_hidden_layers=TINY.layers,
        num_attention_heads=TINY.heads,
        num_key_value_heads=TINY.kv_heads,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        sliding_window=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        MixtralForCausalLM(config).save_pretrained(directory)
    return directory


def test_a_plain_start_has_the_directorys_digest(model: Path, experts: Path) -> None:
    for directory in (model, experts):
        assert layout(directory).weights_digest == digest_of_directory(directory)


@pytest.mark.parametrize("load_format", ["hf", "safetensors", "fastsafetensors"])
def test_formats_that_read_the_same_files_share(model: Path, load_format: str) -> None:
    assert layout(model, load_format=load_format) == layout(model)


def test_settings_that_do_not_change_the_cache_share(model: Path) -> None:
    assert layout(model, hf_overrides={"initializer_range": TINY.seed + 0.02}) == layout(model)
    assert layout(model, max_model_len=1024, seed=3) == layout(model)


def test_an_override_changes_the_fingerprint(model: Path) -> None:
    def other_function(config: Any) -> Any:
        config.rms_norm_eps = 0.5
        return config

    rope = {"rope_type": "default", "rope_theta": 77.0}
    overrides: list[Any] = [{"rms_norm_eps": 0.25}, {"rms_norm_eps": 0.5}, {"rope_parameters": rope}]
    layouts = [layout(model), *(layout(model, hf_overrides=override) for override in overrides)]
    assert len({one.fingerprint() for one in layouts}) == len(layouts)
    assert layout(model, hf_overrides=other_function) == layouts[2], "equal effective configurations have equal layouts"


def test_the_number_of_experts_changes_the_fingerprint(experts: Path) -> None:
    numbers = [layout(experts, hf_overrides={"num_experts_per_tok": number}).fingerprint() for number in (1, 2, 3)]
    assert len(set(numbers)) == 3
    assert numbers[1] == layout(experts).fingerprint(), "an override with the value of the file is none"


def test_another_configuration_changes_the_fingerprint(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "configuration"
    shutil.copytree(model, other)
    assert layout(model, hf_config_path=str(other)) == layout(model)
    text = (other / "config.json").read_text()
    (other / "config.json").write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.125'))
    assert layout(model, hf_config_path=str(other)).fingerprint() != layout(model).fingerprint()


@pytest.mark.parametrize(
    "load_format",
    ["dummy", "npcache", "runai_streamer", "sharded_state", "runai_streamer_sharded", "tensorizer", "modelexpress"],
)
def test_unnameable_weights_are_refused(model: Path, load_format: str) -> None:
    with pytest.raises(LayoutRefused, match=f"load_format.*{load_format}"):
        layout(model, load_format=load_format)
    named = layout(model, weights_digest="named by its user", load_format=load_format)
    assert named.weights_digest == "named by its user"


def test_a_registered_loader_is_refused(model: Path) -> None:
    @register_model_loader("test_loader")
    class Scaling(DefaultModelLoader):  # type: ignore[misc]
        """A loader with other results than vLLM's."""

    with pytest.raises(LayoutRefused, match="load_format.*test_loader"):
        layout(model, load_format="test_loader")


def test_quantised_weights_have_a_digest_of_their_own(model: Path, quantised: Path, tmp_path: Path) -> None:
    online: list[dict[str, Any]] = [
        {"quantization": name, "dtype": "bfloat16"} for name in ("fp8", "fp8_per_channel", "fp8_per_block")
    ]
    ignored: dict[str, Any] = {"quantization_config": {"ignore": ["model.layers.0.self_attn.o_proj"]}}
    layouts = [
        layout(model, dtype="bfloat16"),
        *(layout(model, **arguments) for arguments in online),
        layout(model, **online[1], **ignored),
        layout(quantised, dtype="bfloat16"),
    ]
    assert len({one.weights_digest for one in layouts}) == len(layouts)
    assert layout(model, **online[1]) == layouts[2]
    copied = tmp_path / "copy"
    shutil.copytree(quantised, copied)
    assert layout(copied, dtype="bfloat16") == layouts[-1]
    # The digest that the user gives names the weights, not their quantisation.
    named = [layout(model, weights_digest="mine", **arguments) for arguments in ({"dtype": "bfloat16"}, *online)]
    assert named[0].weights_digest == "mine"
    assert len({one.weights_digest for one in named}) == len(named)


def test_scales_put_the_ranks_into_the_digest(
    model: Path, quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales that ranks compute make the number of ranks part of the digest."""
    gptq = tmp_path / "gptq"
    shutil.copytree(model, gptq)
    settings = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "quant_method": "gptq"}
    (gptq / "quantize_config.json").write_text(json.dumps(settings))
    four: dict[str, Any] = {"quantization": "gptq", "dtype": "float16"}
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    exact = layout(gptq, **four)
    assert layout(gptq, tensor_parallel_size=2, **four) == exact
    assert layout(model, tensor_parallel_size=2) == layout(model)
    with monkeypatch.context() as environment:
        environment.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
        assert len({layout(gptq, tensor_parallel_size=ranks, **four).weights_digest for ranks in (1, 2)}) == 2
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "1")
    digests = {layout(gptq, tensor_parallel_size=ranks, **four).weights_digest for ranks in (1, 2)}
    assert len(digests | {exact.weights_digest}) == 3
    assert len({layout(quantised, tensor_parallel_size=ranks).weights_digest for ranks in (1, 2)}) == 2


@pytest.mark.parametrize("name", ["quantize_config.json", "old_quantize_config.json"])
def test_quantisation_in_a_file_of_its_own_is_part_of_the_digest(model: Path, tmp_path: Path, name: str) -> None:
    """Checkpoints of GPTQ and AWQ may keep the settings in another file than `config.json`. vLLM compares the end of
    its name."""
    older = tmp_path / "older"
    shutil.copytree(model, older)
    digests = set()
    for size in (32, 64):
        settings = {"bits": 4, "group_size": size, "desc_act": False, "sym": True, "quant_method": "gptq"}
        (older / name).write_text(json.dumps(settings))
        digests.add(layout(older, quantization="gptq", dtype="float16").weights_digest)
    assert len(digests) == 2


def test_quantisation_in_the_environment_is_part_of_the_digest(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.json"
    plain = layout(model)
    digests = {layout(model, quantization="fp8", dtype="bfloat16").weights_digest}
    for name, value in (
        ("VLLM_MARLIN_INPUT_DTYPE", "int8"),
        ("VLLM_MARLIN_INPUT_DTYPE", "fp8"),
        ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", '{"dtype": "int4"}'),
        ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", '{"dtype": "int8"}'),
        ("VLLM_HUMMING_INPUT_QUANT_CONFIG", '{"dtype": "int8"}'),
    ):
        with monkeypatch.context() as environment:
            environment.setenv(name, value)
            assert layout(model) == plain, "the weights are not quantised"
            digests.add(layout(model, quantization="fp8", dtype="bfloat16").weights_digest)
    monkeypatch.setenv("VLLM_HUMMING_ONLINE_QUANT_CONFIG", str(file))
    for value in ("int2", "int3"):
        file.write_text(json.dumps({"dtype": value}))
        digests.add(layout(model, quantization="fp8", dtype="bfloat16").weights_digest)
    assert len(digests) == 8


def test_an_adapter_from_modelscope_is_not_looked_up_at_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: str(tmp_path))
    assert directory_of("owner/adapter") == tmp_path
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    with pytest.raises(LayoutRefused, match="ModelScope"):
        directory_of("owner/adapter")
    assert directory_of(str(tmp_path)) == tmp_path


def test_a_cache_in_fp8_names_its_format_and_its_precision(model: Path) -> None:
    found = [
        layout(model),
        layout(model, mode=FP8, kv_cache_dtype="fp8"),
        layout(model, mode=FP8, kv_cache_dtype="fp8_e5m2"),
        layout(model, mode=FP8, kv_cache_dtype="fp8", dtype="bfloat16"),
    ]
    assert [one.dtype for one in found] == ["float32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fn"]
    assert [one.quantisation.rpartition(" ")[2] for one in found] == ["none", "float32", "float32", "bfloat16"]
    assert len({one.fingerprint() for one in found}) == 4
    # A checkpoint may choose the format too; vLLM's setting is "auto" then.
    assert layout(model, mode=FP8) == layout(model, mode=FP8, kv_cache_dtype="fp8_e4m3") == found[1]


def test_other_quantised_caches_are_refused_by_name(model: Path) -> None:
    for name, mode in (
        ("int8_per_token_head", KVQuantMode.INT8_PER_TOKEN_HEAD),
        ("fp8_per_token_head", KVQuantMode.FP8_PER_TOKEN_HEAD),
        ("fp8", KVQuantMode.NONE),
    ):
        with pytest.raises(LayoutRefused, match=f"kv_cache_dtype.*{name}"):
            layout(model, mode=mode, kv_cache_dtype=name)


@pytest.mark.parametrize("fault", ["calculate_kv_scales", "fnuz"])
def test_a_cache_of_another_meaning_is_refused(fault: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache whose bytes mean something else is refused by name."""
    if fault == "fnuz":
        monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda cls: True))
    else:
        # Versions of vLLM that can measure the scales in one engine have this setting.
        monkeypatch.setattr(CacheConfig, "calculate_kv_scales", True, raising=False)
    with pytest.raises(LayoutRefused, match=fault):
        layout(model, mode=FP8, kv_cache_dtype="fp8")


def test_a_models_processor_of_images_is_part_of_the_digest(tmp_path: Path) -> None:
    pictures = save_pictures(tmp_path / "pictures", TINY)
    arguments: dict[str, Any] = {"skip_tokenizer_init": False}
    first = layout(pictures, **arguments)
    assert json.loads(first.position)["kind"] == "rope"
    assert layout(pictures, max_model_len=1024, **arguments) == first
    other = layout(pictures, mm_processor_kwargs={"do_rescale": False}, **arguments)
    (file,) = pictures.glob("*processor_config.json")
    file.write_text(file.read_text().replace('"height": 32', '"height": 16'))
    assert len({one.weights_digest for one in (first, other, layout(pictures, **arguments))}) == 3


def test_each_format_of_two_kinds_has_its_own_digest(model: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    shutil.copytree(model, both)
    torch.save({"other": torch.zeros(1)}, both / "model.pt")
    consolidated = tmp_path / "consolidated"
    shutil.copytree(model, consolidated)
    assert load_file(consolidated / "model.safetensors")
    (consolidated / "model.safetensors").rename(consolidated / "consolidated.safetensors")
    shutil.copy(model / "model.safetensors", consolidated)
    for directory, formats in ((both, ("auto", "pt")), (consolidated, ("auto", "safetensors"))):
        assert len({layout(directory, load_format=name).fingerprint() for name in formats}) == 2


def test_object_storage_is_refused(model: Path) -> None:
    config = configured(model)
    config.model_config.model_weights = "s3://bucket/model"
    spec = FullAttentionSpec(block_size=128, num_kv_heads=TINY.kv_heads, head_size=32, dtype=torch.float32)
    cached = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    with pytest.raises(LayoutRefused, match="model_weights"):
        layout_of(config, cached, read_settings({}, {}))
