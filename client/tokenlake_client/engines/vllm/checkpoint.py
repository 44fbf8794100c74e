"""The digest of the weights that vLLM loads.

For a model directory that vLLM serves without overrides it is that of the directory. A configuration that differs from
the directory's (overrides, the path of another configuration, a window that is switched off) changes the digest, and so
does the load format where the directory holds weights in several formats. The quantisation of the weights is part of
the digest. Weights that cannot be identified are refused with the name of the setting.

vLLM's names are imported in the functions that use them: an engine whose version of vLLM lacks one of them runs without
the pool.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tokenlake.errors import LayoutRefused
from tokenlake_client.engines.common.model_config import directory_in_cache
from tokenlake_client.engines.vllm.settings import EngineSettings
from tokenlake_client.weights import digest_of_changes, digest_of_directory, weight_formats

FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt")
"""The supported load formats: they read the weight files of the directory unchanged. `npcache` reads a converted
copy."""
NOT_COMPUTED_WITH = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Settings that the weights digest leaves out, because they do not change the computation; the dtype has a field of its
own in the layout."""
QUANTISING_VARIABLES = (
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
)
"""Variables of vLLM's environment that quantise weights, or the activations of quantised weights. Their value may be
the path of a file with the settings."""

EXACT_ACTIVATIONS = ("auto_awq", "auto_gptq", "awq", "awq_marlin", "gptq", "gptq_marlin")
"""Methods with scales in the checkpoint alone. vLLM's CPU kernels for them quantise activations nevertheless, unless
the environment forbids it."""
WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding that have no draft model."""

MEDIA_SETTINGS = ("media_io_kwargs", "mm_processor_kwargs", "mm_encoder_attn_dtype", "video_pruning_rate")
"""vLLM's settings that change the inputs which the decoder gets for an image, a sound or a video."""


def check_machines(parallel: Any) -> None:
    """Raise `LayoutRefused` for an engine whose ranks run on several machines: all of them read and write slots of one
    daemon's memory."""
    machines = getattr(parallel, "nnodes_within_dp", 1)
    if machines > 1:
        raise LayoutRefused(
            f"vLLM setting 'nnodes' puts the ranks on {machines} machines: supported are ranks beside one daemon"
        )


def weights_digest_of(vllm_config: Any, settings: EngineSettings) -> str:
    """The layout's weights digest: the digest that the settings name, else that of the checkpoint. Weights that vLLM
    quantises or that are quantised have a digest of their own in both cases. `vllm_config`: vLLM's configuration of the
    engine. Raises `LayoutRefused` for weights that cannot be identified."""
    model = vllm_config.model_config
    if settings.weights_digest:
        return digest_of_changes(settings.weights_digest, _quantisation_of(vllm_config, model, None))
    return _digest_of_checkpoint(vllm_config, model)


def digest_of_draft(vllm_config: Any) -> str | None:
    """The method of speculative decoding and, where a draft model has a cache of its own, the digest of its weights;
    None without speculation. Raises `LayoutRefused` for a draft model that cannot be identified."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    method, draft = str(speculative.method), speculative.draft_model_config
    if draft is None or method in WITHOUT_WEIGHTS:
        return method
    return f"{method} {_digest_of_checkpoint(vllm_config, draft)}"


def _digest_of_checkpoint(vllm_config: Any, model: Any) -> str:
    """The digest of the weights of `model`, the engine's model or its draft model."""
    load = vllm_config.load_config
    _check_loader(load)
    if model.model_weights:
        raise _unnamed("model_weights", model.model_weights, "weights in object storage are not supported")
    directory = _directory_of(model, load)
    changes = _quantisation_of(vllm_config, model, directory)
    configuration = _changed_settings(model, directory)
    if configuration:
        changes["configuration"] = configuration
    changes |= _media_settings(model, directory)
    if weight_formats(directory) > 1:
        changes["load_format"] = load.load_format
    return digest_of_changes(digest_of_directory(directory), changes)


def _quantisation_of(vllm_config: Any, model: Any, directory: Path | None) -> dict[str, object]:
    """By name, the settings of vLLM that quantise the weights or the activations; empty where the weights are not
    quantised.

    The method is one of them, because a checkpoint may support several. The settings in the checkpoint's `config.json`
    are not: the digest of its directory has them. Those of some older formats are in other files of the `directory`.
    The number of ranks is one of them where scales are computed while the model runs or is loaded: each rank computes
    those of its own part, so the results differ by more than the order of sums.
    """
    if model.quantization is None:
        return {}
    settings: dict[str, object] = {"quantization": model.quantization}
    # The text is read here, because vLLM changes the objects that it makes of it.
    for name in QUANTISING_VARIABLES:
        text = os.environ.get(name)
        if text is not None:
            settings[name] = Path(text).read_text() if os.path.isfile(text) else text
    exact = model.quantization in EXACT_ACTIVATIONS and model.quantization_config is None and len(settings) == 1
    if exact and _quantises_activations_on_cpu():
        settings["VLLM_CPU_INT4_W4A8"], exact = True, False
    if not exact:
        settings["tensor_parallel_size"] = vllm_config.parallel_config.tensor_parallel_size
    if model.quantization_config is not None:
        settings["quantization_config"] = repr(model.quantization_config)
    overrides = model.hf_overrides if isinstance(model.hf_overrides, dict) else {}
    if overrides.get("quantization_config_file") is not None:
        raise _unnamed("quantization_config_file", overrides["quantization_config_file"], "give its contents")
    from vllm.model_executor.layers.quantization import get_quantization_config

    if directory is not None:
        # vLLM reads a file whose name ends with one of these names.
        names = tuple(get_quantization_config(model.quantization).get_config_filenames())
        files = sorted(path for path in directory.glob("*.json") if path.name.endswith(names))
        settings |= {path.name: path.read_text() for path in files}
    return settings


def _media_settings(model: Any, directory: Path) -> dict[str, object]:
    """By name, the settings and the files in `directory` that decide how images, sound and video become the inputs of
    the decoder; empty for a model of text alone."""
    if not model.is_multimodal_model:
        return {}
    media = model.multimodal_config
    if media.mm_encoder_fp8_scale_path is not None:
        raise _unnamed(
            "mm_encoder_fp8_scale_path", media.mm_encoder_fp8_scale_path, "scales of a file are not supported"
        )
    settings: dict[str, object] = {
        name: value for name in MEDIA_SETTINGS if (value := getattr(media, name, None)) not in (None, {})
    }
    for path in sorted(directory.glob("*processor_config.json")):
        settings[path.name] = path.read_text()
    return settings


def _quantises_activations_on_cpu() -> bool:
    from vllm import envs
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu() and envs.VLLM_CPU_INT4_W4A8)


def _check_loader(load: Any) -> None:
    from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader

    # The loader's class is checked too, because a plug-in may have registered its own loader under one of vLLM's names.
    if load.load_format not in FORMATS or type(get_model_loader(load)) is not DefaultModelLoader:
        raise _unnamed("load_format", load.load_format, f"supported: {', '.join(FORMATS)}, with vLLM's own loader")


def _directory_of(model: Any, load: Any) -> Path:
    directory = Path(model.model)
    if directory.is_dir():
        return directory
    from vllm import envs

    if envs.VLLM_USE_MODELSCOPE:
        raise _unnamed(
            "model", model.model, "the directory of ModelScope is not known; give the path of the model's directory"
        )
    return directory_in_cache(model.model, model.revision, load.download_dir)


def _changed_settings(model: Any, directory: Path) -> dict[str, object]:
    """By name, the settings of vLLM's effective configuration whose value differs from the directory's `config.json`;
    a setting that vLLM's lacks has the value None."""
    from vllm.transformers_utils.config import get_config

    try:
        # The file is read by vLLM's own function, so that the settings which vLLM adds to every configuration are equal
        # on both sides.
        stated = _settings(get_config(directory, model.trust_remote_code, config_format="hf"))
    except Exception as error:
        raise LayoutRefused(f"the configuration in {directory} cannot be read: {error}") from error
    effective = _settings(model.hf_config)
    # A setting that is None on one side and absent on the other does not count as a difference.
    return {
        name: effective.get(name)
        for name in sorted({*stated, *effective})
        if stated.get(name) != effective.get(name) and name not in NOT_COMPUTED_WITH
    }


def _settings(config: Any) -> dict[str, object]:
    settings: dict[str, object] = config.to_dict()
    return settings


def _unnamed(field: str, value: object, reason: str) -> LayoutRefused:
    return LayoutRefused(f"vLLM setting '{field}' is {value!r}: the weights cannot be identified; {reason}")
