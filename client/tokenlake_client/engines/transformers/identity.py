"""The weights digest of a loaded model.

A model that was loaded from a directory and is still what the directory says has the directory's digest, so
that it shares with every engine that loads the same files. Any other has the digest of its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from transformers import AutoConfig

from tokenlake.errors import LayoutRefused
from tokenlake_client.weights import digest_of_directory, digest_of_tensors, weight_files

__all__ = ["weights_digest_of"]

NOT_COMPUTED_WITH = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
"""Settings that do not change what the weights compute (the dtype has its own field in the layout)."""
PIECE = 1 << 18
"""Elements compared at a time: they stay in the processor's cache."""


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
    """Whether configuration and weights are still those in `directory`, to the last bit. Weights that the files
    hold under other names, or not at all, count as changed: the digest of the tensors is then used, which is
    never wrong."""
    files = weight_files(directory)
    if not files or any(file.suffix != ".safetensors" for file in files):
        return False
    if _settings(AutoConfig.from_pretrained(directory)) != _settings(model.config):
        return False
    compared: set[str] = set()
    for file in files:
        names = _equal_names(file, state)
        if names is None:
            return False
        compared |= names
    # A file holds tied weights once, under the name of one of them.
    places = {_place(state[name]) for name in compared}
    return all(name in compared or _place(tensor) in places for name, tensor in state.items())


def _place(tensor: Any) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _equal_names(path: Path, state: Mapping[str, Any]) -> set[str] | None:
    """The names in `path`, or None where one of its tensors is not what `state` holds under its name."""
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        # The file is mapped: each tensor is read while it is compared.
        if all(name in state and _equal(file.get_tensor(name), state[name]) for name in names):
            return names
    return None


def _equal(stored: Any, loaded: Any) -> bool:
    """Whether loading `stored` with the dtype of `loaded` gives the same bits. A piece at a time, so that
    what a conversion or a copy from an accelerator makes stays small."""
    if stored.shape != loaded.shape:
        return False
    one, other = stored.reshape(-1), loaded.detach().reshape(-1)
    for start in range(0, other.numel(), PIECE):
        piece = other[start : start + PIECE].cpu()
        if not np.array_equal(_bits(one[start : start + PIECE].to(piece.dtype)), _bits(piece)):
            return False
    return True


def _bits(tensor: Any) -> NDArray[np.uint8]:
    """The bytes: equal numbers may differ in them (-0.0 and 0.0), and a NaN is not equal to itself."""
    content: NDArray[np.uint8] = tensor.contiguous().view(torch.uint8).numpy()
    return content
