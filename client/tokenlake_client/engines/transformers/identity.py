"""The weights digest of a loaded model.

A model that was loaded from a directory and is still what the directory says has the directory's digest, so
that it shares with every engine that loads the same files. Any other has the digest of its tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from tokenlake.errors import LayoutRefused
from tokenlake_client.weights import digest_of_directory, digest_of_tensors, weight_files

__all__ = ["weights_digest_of"]

NOT_COMPUTED_WITH = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
"""Settings that do not change what the weights compute (the dtype has its own field in the layout)."""
SAMPLES = 64
"""Elements compared at either end of each tensor: enough to notice training, merging and scaling."""
FILE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def weights_digest_of(model: Any) -> str:
    """Hex digest. Raises `LayoutRefused` where the weights are not in memory."""
    state = model.state_dict()
    if any(tensor.is_meta for tensor in state.values()):
        raise LayoutRefused("layout field 'weights_digest': some weights are not in memory")
    directory = Path(model.name_or_path) if model.name_or_path else None
    if directory is not None and directory.is_dir() and _loaded_from(model, state, directory):
        return digest_of_directory(directory)
    return digest_of_tensors(_settings(model.config), _contents(state))


def _settings(config: Any) -> dict[str, object]:
    return {name: value for name, value in config.to_dict().items() if name not in NOT_COMPUTED_WITH}


def _contents(state: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
    for name, tensor in state.items():
        flat = tensor.detach().reshape(-1).cpu().contiguous().view(torch.uint8)
        yield name, str(tensor.dtype), tuple(tensor.shape), memoryview(flat.numpy())


def _loaded_from(model: Any, state: Mapping[str, Any], directory: Path) -> bool:
    """Whether configuration and sampled weights are still those in `directory`. Weights that the files
    hold under other names count as changed: the digest of the tensors is then used, which is never wrong."""
    files = weight_files(directory)
    if not files or any(file.suffix != ".safetensors" for file in files):
        return False
    if _settings(AutoConfig.from_pretrained(directory)) != _settings(model.config):
        return False
    return all(_samples_equal(file, state) for file in files)


def _samples_equal(path: Path, state: Mapping[str, Any]) -> bool:
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            dtype = FILE_DTYPES.get(entry["dtype"])
            if dtype is None or name not in state or list(state[name].shape) != entry["shape"]:
                return False
            flat = state[name].detach().reshape(-1)
            for start in (0, max(0, flat.numel() - SAMPLES)):
                count = min(SAMPLES, flat.numel() - start)
                file.seek(8 + header_bytes + entry["data_offsets"][0] + start * dtype.itemsize)
                stored = torch.frombuffer(bytearray(file.read(count * dtype.itemsize)), dtype=dtype)
                loaded = flat[start : start + count].cpu()
                if not torch.equal(stored.to(loaded.dtype), loaded):
                    return False
    return True
