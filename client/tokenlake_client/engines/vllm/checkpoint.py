"""The weights digest of what vLLM loads: the files, and what it makes of them.

Plainly started it is the digest of the model's directory, which the transformers integration has too. A configuration
that differs from the directory's (overrides, another configuration's path, a window that is switched off) changes it,
and so does the load format where the directory has weights of several kinds. A loader that does not read the
directory's files as they are has no digest: it is refused by name.

vLLM is imported where it is used: another version of it, without one of these names, is served without the pool.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenlake.errors import LayoutRefused
from tokenlake_client.weights import digest_of_changes, digest_of_directory, weight_files

__all__ = ["digest_of_checkpoint"]

FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt")
"""Load formats that read the weight files of the directory as they are. `npcache` reads a copy of its own making."""
CONSOLIDATED = "consolidated"
"""Files of Mistral's format, which `auto` prefers to all others."""
NOT_COMPUTED_WITH = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Settings that do not change what the weights compute (the dtype has its own field in the layout)."""


def digest_of_checkpoint(vllm_config: Any) -> str:
    """Hex digest. `vllm_config`: vLLM's configuration of the engine. Raises `LayoutRefused` where the weights cannot
    be named."""
    model, load = vllm_config.model_config, vllm_config.load_config
    _check_loader(load)
    if model.model_weights:
        raise _refused("model_weights", model.model_weights, "weights in object storage are not read here")
    directory = _directory_of(model, load)
    changes: dict[str, object] = {}
    configuration = _changed_settings(model, directory)
    if configuration:
        changes["configuration"] = configuration
    if _kinds(directory) > 1:
        changes["load_format"] = load.load_format
    return digest_of_changes(digest_of_directory(directory), changes)


def _check_loader(load: Any) -> None:
    from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader

    # A plug-in may have put a loader of its own in the place of vLLM's.
    if load.load_format not in FORMATS or type(get_model_loader(load)) is not DefaultModelLoader:
        raise _refused("load_format", load.load_format, f"supported: {', '.join(FORMATS)}, with vLLM's own loader")


def _directory_of(model: Any, load: Any) -> Path:
    directory = Path(model.model)
    if directory.is_dir():
        return directory
    from vllm import envs

    if envs.VLLM_USE_MODELSCOPE:
        raise _refused("model", model.model, "where ModelScope keeps it is not known; name a directory")
    # vLLM has downloaded the weights before it caches anything.
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True
        )
    except Exception as error:
        raise LayoutRefused(f"the weights of {model.model!r} are not in the local cache: {error}") from error
    return Path(found)


def _changed_settings(model: Any, directory: Path) -> dict[str, object]:
    """Settings of the effective configuration that are not as in the directory's `config.json`; None: removed."""
    from vllm.transformers_utils.config import get_config

    try:
        # Read as vLLM reads it, so that only what was asked for differs, and not what vLLM adds to every configuration.
        stated = _settings(get_config(directory, model.trust_remote_code, config_format="hf"))
    except Exception as error:
        raise LayoutRefused(f"the configuration in {directory} cannot be read: {error}") from error
    effective = _settings(model.hf_config)
    # A setting may be None on one side and absent on the other.
    return {
        name: effective.get(name)
        for name in sorted({*stated, *effective})
        if stated.get(name) != effective.get(name) and name not in NOT_COMPUTED_WITH
    }


def _settings(config: Any) -> dict[str, object]:
    settings: dict[str, object] = config.to_dict()
    return settings


def _kinds(directory: Path) -> int:
    """How many sets of weights the directory may hold, of which a load format chooses one."""
    return len({(path.suffix, path.name.startswith(CONSOLIDATED)) for path in weight_files(directory)})


def _refused(field: str, value: object, reason: str) -> LayoutRefused:
    return LayoutRefused(f"vLLM setting '{field}' is {value!r}: the weights cannot be named; {reason}")
