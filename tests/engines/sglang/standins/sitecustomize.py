"""What SGLang's HiCache needs of a GPU, for engines on a CPU. Python runs this module in every process of an engine
whose path it is on.

- `cudaHostRegister` makes the host pool readable for the GPU, and buffers of SGLang's backend `file` are page-locked.
  Here the device's memory is the host's: nothing to do.
- The copies between host pool and device pool are kernels. Here they are torch's own, for the layout
  `page_first_direct` and the I/O backend `direct`.
- SGLang starts no host tier that leaves less than 10 GB of the machine's memory. Here it leaves 1 GB.
- SGLang's attention with torch reads the layers with a window at the places of the other layers' pool, so that it fails
  behind a cached prefix by itself. Here it reads them at their own places.
- Its attention behind a cached prefix computes the cached tokens too. With the variable `TOKENLAKE_SGLANG_NEW_ROWS`,
  which measurements set, it computes the new ones, as on a GPU.
- SGLang imports torchvision, whose build on PyPI does not fit torch's for CPUs: it lacks the operators that it
  describes. None of them is called.

Everything else is SGLang's own code, above all the cache controller, its threads, and the host pools."""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

POOLS = "sglang.srt.mem_cache.pool_host."


def copy_rows(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """Stands in for `transfer_kv_direct`: rows of each layer."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices].to(target.dtype)


def load_layer(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int) -> None:
    """Stands in for `transfer_kv_per_layer_direct_pf_lf`: one layer from host pools [page, layer, token, ...]."""
    pages, tokens = src_indices // page_size, src_indices % page_size
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        device[dst_indices] = host[pages, layer_id, tokens].to(device.dtype)


def save_layers(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """Stands in for `transfer_kv_all_layer_direct_lf_pf`: all layers into host pools [page, layer, token, ...]."""
    pages, tokens = dst_indices // page_size, dst_indices % page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, host in enumerate(dst_ptrs):
        for layer in range(layers):
            host[pages, layer, tokens] = src_ptrs[number * layers + layer][src_indices].to(host.dtype)


def _new_rows(
    self: Any,
    query: Any,
    output: Any,
    keys: Any,
    values: Any,
    places: Any,
    rows: Any,
    lengths: Any,
    cached: Any,
    new: Any,
    encoder: Any = None,
    scaling: Any = None,
    enable_gqa: bool = False,
    causal: bool = False,
    **ignored: object,
) -> Any:
    """Attention of the new tokens of each prompt: SGLang's own function computes it for the cached ones too, whose
    results it drops, so that a cached prefix saves little of a long prompt."""
    import torch

    at = 0
    for number, length in enumerate(lengths.tolist()):
        count, before = int(new[number]), int(cached[number])
        own = places[rows[number], :length]
        mask = torch.ones(count, length, dtype=torch.bool).tril(before) if causal and before else None
        heads = [part.movedim(0, 1).unsqueeze(0) for part in (query[at : at + count], keys[own], values[own])]
        result = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=mask, is_causal=causal and not before, scale=scaling, enable_gqa=enable_gqa
        )
        output[at : at + count] = result.squeeze(0).movedim(0, 1)
        at += count
    return output


def _windows(module: Any) -> None:
    import torch

    backend = module.TorchNativeAttnBackend
    if os.environ.get("TOKENLAKE_SGLANG_NEW_ROWS"):
        backend._run_sdpa_forward_extend = _new_rows

    def at_own_places(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            self: Any, query: Any, output: Any, keys: Any, values: Any, places: Any, rows: Any, *rest: Any, **named: Any
        ) -> Any:
            if self.use_sliding_window_kv_pool and named.get("sliding_window_size") is not None:
                own = self.token_to_kv_pool.translate_loc_from_full_to_swa(places[rows].long())
                places, rows = own.clamp(min=0), torch.arange(len(rows))
            return run(self, query, output, keys, values, places, rows, *rest, **named)

        return call

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(backend, name, at_own_places(getattr(backend, name)))


def _common(module: Any) -> None:
    module._cuda_host_register = lambda *arguments, **options: None


def _copies(module: Any) -> None:
    module.transfer_kv_direct = copy_rows
    module.transfer_kv_per_layer_direct_pf_lf = load_layer
    module.transfer_kv_all_layer_direct_lf_pf = save_layers
    for name in ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost"):
        if hasattr(module, name):
            _unpinned(getattr(module, name))


def _unpinned(pool: Any) -> None:
    original = pool.get_dummy_flat_data_page

    def page(self: Any) -> Any:
        pinned, self.pin_memory = self.pin_memory, False
        try:
            return original(self)
        finally:
            self.pin_memory = pinned

    pool.get_dummy_flat_data_page = page


def _operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")
    # The operators live as long as this object.
    KEPT.append(library)


KEPT: list[Any] = []
BEFORE: dict[str, Callable[[], None]] = {"torchvision": _operators}
"""What is done before a module runs."""


def _reserve(module: Any) -> None:
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30


CHANGES: dict[str, Callable[[Any], None]] = {
    "sglang.srt.layers.attention.torch_native_backend": _windows,
    f"{POOLS}base": _reserve,
    f"{POOLS}common": _common,
    f"{POOLS}mha": _copies,
    f"{POOLS}mla": _copies,
    f"{POOLS}mamba": _copies,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Calls these functions directly before and after a module runs."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name not in CHANGES and name not in BEFORE:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        loader: Any = spec.loader if spec else None
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            BEFORE.get(name, lambda: None)()
            run(module)
            CHANGES.get(name, lambda module: None)(module)

        loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
