"""LMCache's part of an L2 adapter, without LMCache: its abstract base, its bits, keys and objects in numpy. They have
the names and the fields of LMCache 0.5.6."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray


class Interface:
    """`L2AdapterInterface`."""

    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self.max_capacity_bytes = max_capacity_bytes


class Bits:
    """`Bitmap`."""

    def __init__(self, size: int) -> None:
        self.values = [False] * size

    def set(self, index: int) -> None:
        self.values[index] = True


class StoreResult(int):
    """`L2StoreResult`."""

    def __new__(cls, success: bool, transferred: int) -> StoreResult:
        return super().__new__(cls, transferred if success else -1)


class Notifier:
    """`EventfdNotifier`."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._fd

    def notify(self) -> None:
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True)
class Dtype:
    """A dtype of torch."""

    name: str = "torch.float32"
    itemsize: int = 4

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Key:
    """`ObjectKey`."""

    chunk_hash: bytes
    model_name: str = "m"
    kv_rank: int = 1 << 24
    object_group_id: int = 0
    cache_salt: str = ""


@dataclass
class Described:
    """`MemoryLayoutDesc`, of one tensor."""

    shapes: list[tuple[int, ...]] = field(default_factory=lambda: [(2, 3, 16, 4)])
    dtypes: list[Dtype] = field(default_factory=lambda: [Dtype()])


class Held:
    """`TensorMemoryObj`: the object number `order` of `seed`, or zeros."""

    def __init__(self, described: Described | None = None, content: bytes | None = None) -> None:
        self._described = described or Described()
        size = sum(
            int(np.prod(shape)) * dtype.itemsize
            for shape, dtype in zip(self._described.shapes, self._described.dtypes, strict=True)
        )
        self.bytes: NDArray[np.uint8] = np.zeros(size, np.uint8)
        if content is not None:
            self.bytes[:] = np.resize(np.frombuffer(content, np.uint8), size)

    @property
    def data_ptr(self) -> int:
        return self.bytes.ctypes.data

    def get_size(self) -> int:
        return self.bytes.nbytes

    def get_shapes(self) -> list[tuple[int, ...]]:
        return self._described.shapes

    def get_dtypes(self) -> list[Dtype]:
        return self._described.dtypes


def keys(count: int, seed: int = 0, **fields: Any) -> list[Key]:
    """The keys of consecutive chunks."""
    return [Key(hashlib.sha256(f"{seed} {number}".encode()).digest(), **fields) for number in range(count)]


def written(count: int, seed: int = 0, described: Described | None = None) -> list[Held]:
    """Objects with numbers that follow from `seed`."""
    return [Held(described, np.random.default_rng([seed, number]).bytes(512)) for number in range(count)]


def standing_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the adapter, which finds these classes instead of LMCache's. Ends with the test."""
    paths = (
        "lmcache",
        "lmcache.lmcache_native",
        "lmcache.v1",
        "lmcache.v1.distributed",
        "lmcache.v1.distributed.internal_api",
        "lmcache.v1.distributed.l2_adapters",
        "lmcache.v1.distributed.l2_adapters.base",
        "lmcache.v1.platform",
    )
    modules: dict[str, Any] = {path: ModuleType(path) for path in paths}
    for path, module in modules.items():
        monkeypatch.setitem(sys.modules, path, module)
    modules["lmcache"].__version__ = "0"
    modules["lmcache.lmcache_native"].Bitmap = Bits
    modules["lmcache.v1.distributed.internal_api"].L2StoreResult = StoreResult
    modules["lmcache.v1.distributed.l2_adapters.base"].L2AdapterInterface = Interface
    modules["lmcache.v1.platform"].create_event_notifier = Notifier
    monkeypatch.delitem(sys.modules, "tokenlake_client.engines.lmcache.adapter", raising=False)
    import tokenlake_client.engines.lmcache.adapter as adapter

    monkeypatch.delitem(sys.modules, "tokenlake_client.engines.lmcache.adapter")
    return adapter
