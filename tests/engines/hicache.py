"""SGLang's part of a HiCache storage backend, without SGLang: its abstract base, its messages, and host pools in numpy.
They have the names and the fields of SGLang 0.5.23."""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import pytest

PAGE = 16
"""Tokens of a page."""


class Storage:
    """`HiCacheStorage`."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if not hasattr(self, "registered_pools"):
            self.registered_pools: dict[Any, Any] = {}
        self.registered_pools[host_pool_name] = host_pool


@dataclass
class Config:
    """`HiCacheStorageConfig`."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    model_name: str | None = "m"
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0


class Policy(enum.StrEnum):
    """`PoolHitPolicy`."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class Transfer:
    """`PoolTransfer`."""

    name: str
    host_indices: Any = None
    keys: list[str] | None = None
    hit_policy: Policy = Policy.ALL_PAGES


@dataclass
class Result:
    """`PoolTransferResult`."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None

    @classmethod
    def empty(cls) -> Result:
        return cls(0, {})


@dataclass
class HostPool:
    """A host pool of `pages` pages, whose parts (keys, values) lie apart as in the layout `page_first`."""

    pages: int = 32
    part_bytes: tuple[int, ...] = (64, 32)
    page_size: int = PAGE
    layout: str = "page_first"
    dtype: str = "torch.float32"
    head_num: int = 2
    broken: bool = False
    kv_buffer: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.kv_buffer = [np.zeros((self.pages, size), np.uint8) for size in self.part_bytes]

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        if self.broken:
            raise NotImplementedError("this layout has no places")
        places, sizes = [], []
        for index in indices.tolist()[:: self.page_size]:
            for part in self.kv_buffer:
                places.append(part[index // self.page_size].ctypes.data)
                sizes.append(part.shape[1])
        return places, sizes

    def write(self, pages: Sequence[int], seed: int) -> None:
        """Fill pages with numbers that follow from `seed` and their order."""
        for order, page in enumerate(pages):
            self.fill(page, seed, order)

    def fill(self, page: int, seed: int, order: int) -> None:
        """Fill a page with `content`."""
        content = np.frombuffer(self.content(seed, order), np.uint8)
        for part in self.kv_buffer:
            part[page], content = content[: part.shape[1]], content[part.shape[1] :]

    def content(self, seed: int, order: int) -> bytes:
        """Numbers that follow from `seed` and `order`."""
        return np.random.default_rng([seed, order]).bytes(sum(self.part_bytes))

    def read(self, page: int) -> bytes:
        return b"".join(part[page].tobytes() for part in self.kv_buffer)


def standing_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the backend, which finds these classes instead of SGLang's. Ends with the test."""
    names = ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.hicache_storage")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module: Any = sys.modules[names[-1]]
    module.HiCacheStorage, module.HiCacheStorageConfig = Storage, Config
    module.PoolHitPolicy, module.PoolTransfer, module.PoolTransferResult = Policy, Transfer, Result
    monkeypatch.delitem(sys.modules, "tokenlake_client.engines.sglang.storage", raising=False)
    import tokenlake_client.engines.sglang.storage as storage

    monkeypatch.delitem(sys.modules, "tokenlake_client.engines.sglang.storage")
    monkeypatch.setattr(storage, "watch", lambda weights: True)
    return storage
