"""The calls of CUDA's driver API: their declarations are those of cuda.h, and their preconditions are met."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenlake_client.engines.devices.base import DeviceFailed
from tokenlake_client.engines.devices.cuda_driver import CudaDriver
from tokenlake_client.mapped_memory import MappedMemory
from tokenlake_testing.pinned_memory import PinnedMemory

HEADER = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include", "cuda.h")
INVALID_VALUE, INVALID_CONTEXT, NOT_SUPPORTED = 1, 201, 801
CONTEXT = 0xC0
NAMES = (
    *("cuInit", "cuDeviceGet", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2"),
    *("cuCtxPopCurrent_v2", "cuMemHostRegister_v2", "cuMemHostUnregister", "cuMemAlloc_v2", "cuMemFree_v2"),
    *("cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle", "cuGetErrorName"),
)


class Library:
    """Stands for libcuda on a GPU that can, or cannot, lock memory that is mapped read-only."""

    def __init__(self, *, read_only: bool) -> None:
        self.locks = PinnedMemory()
        self.current: list[int] = []
        self.opened: list[tuple[bytes, int]] = []

        def set_to(value: Any) -> Any:
            def call(pointer: Any, *_: Any) -> int:
                pointer._obj.value = value
                return 0

            return call

        def push(context: Any) -> int:
            self.current.append(context.value)
            return 0

        def pop(pointer: Any) -> int:
            pointer._obj.value = self.current.pop()
            return 0

        def register(address: int, nbytes: int, flags: int) -> int:
            if flags & 8 and not read_only:
                return NOT_SUPPORTED
            return 0 if self.locks.pin(address, nbytes, write=not flags & 8) else INVALID_VALUE

        def unregister(address: int) -> int:
            self.locks.unpin(address)
            return 0

        def open_handle(pointer: Any, handle: Any, flags: int) -> int:
            self.opened.append((bytes(handle), flags))
            pointer._obj.value = 0xD000
            return 0

        def name(code: int, pointer: Any) -> int:
            pointer._obj.value = {801: b"CUDA_ERROR_NOT_SUPPORTED", 1: b"CUDA_ERROR_INVALID_VALUE"}.get(code)
            return 0 if pointer._obj.value else INVALID_VALUE

        self.cuInit = lambda flags: 0
        self.cuDeviceGet = set_to(3)
        self.cuDeviceGetAttribute = set_to(int(read_only))
        self.cuDevicePrimaryCtxRetain = set_to(CONTEXT)
        self.cuCtxPushCurrent_v2, self.cuCtxPopCurrent_v2 = push, pop
        self.cuMemHostRegister_v2 = self._in_context(register)
        self.cuMemHostUnregister = self._in_context(unregister)
        self.cuMemAlloc_v2 = self._in_context(set_to(0xA000))
        self.cuMemFree_v2 = self._in_context(lambda address: 0)
        self.cuIpcGetMemHandle = self._in_context(lambda handle, address: 0)
        self.cuIpcOpenMemHandle_v2 = self._in_context(open_handle)
        self.cuIpcCloseMemHandle = self._in_context(lambda address: 0)
        self.cuGetErrorName = name

    def _in_context(self, call: Any) -> Any:
        return lambda *arguments: call(*arguments) if self.current == [CONTEXT] else INVALID_CONTEXT


def memory(*, write: bool) -> MappedMemory:
    descriptor = os.memfd_create("region")
    os.ftruncate(descriptor, mmap.PAGESIZE)
    mapped = MappedMemory(descriptor, mmap.PAGESIZE, write=write)
    os.close(descriptor)
    return mapped


@pytest.mark.parametrize("write", [True, False])
def test_mapped_memory_is_locked_and_its_lock_ends(*, write: bool) -> None:
    library, mapped = Library(read_only=True), memory(write=write)
    driver = CudaDriver(0, library)
    driver.lock(mapped.address, mapped.nbytes, write=write)
    assert list(library.locks.pinned) == [mapped.address]
    with pytest.raises(DeviceFailed, match="cuMemHostRegister_v2: CUDA_ERROR_INVALID_VALUE"):
        driver.lock(mapped.address, mapped.nbytes, write=write)
    driver.unlock(mapped.address)
    assert not library.locks.pinned
    assert not library.current, "the thread's context is what it was, also after an error"


def test_a_gpu_that_cannot_lock_read_only_memory_is_not_asked_to() -> None:
    library, mapped = Library(read_only=False), memory(write=False)
    with pytest.raises(DeviceFailed, match="read-only"):
        CudaDriver(0, library).lock(mapped.address, mapped.nbytes, write=False)
    assert not library.locks.pinned


def test_how_a_handle_is_passed() -> None:
    """A handle is passed by value with the flag that CUDA requires."""
    library = Library(read_only=True)
    driver = CudaDriver(0, library)
    assert len(driver.handle(driver.allocate(100))) == 64
    assert driver.open(bytes(range(64))) == 0xD000
    assert library.opened == [(bytes(range(64)), 1)]
    with pytest.raises(DeviceFailed, match="63 bytes"):
        driver.open(bytes(63))
    driver.close(0xD000)
    assert not library.current


def test_the_declarations_are_those_of_cuda_h() -> None:
    if not HEADER.exists():
        pytest.skip("no cuda.h")
    header = HEADER.read_text(errors="replace")
    library: Any = SimpleNamespace(**{name: lambda *_: 0 for name in NAMES})
    CudaDriver(0, library)
    types = {
        "unsigned int": ctypes.c_uint,
        "int": ctypes.c_int,
        "size_t": ctypes.c_size_t,
        "void *": ctypes.c_void_p,
        "CUresult": ctypes.c_int,
        "CUdevice": ctypes.c_int,
        "CUdevice_attribute": ctypes.c_int,
        "CUcontext": ctypes.c_void_p,
        "CUdeviceptr": ctypes.c_uint64,
        "const char *": ctypes.c_char_p,
        "CUipcMemHandle": library.cuIpcOpenMemHandle_v2.argtypes[1],
    }
    assert ctypes.sizeof(types["CUipcMemHandle"]) == 64
    for name in NAMES:
        base, _, version = name.partition("_v")
        found = re.search(rf"^CUresult CUDAAPI {base}\((.*?)\);", header, re.MULTILINE)
        assert found is not None
        assert (f"#define {base} " in header) == bool(version)
        assert not version or re.search(rf"#define {base} +{name}$", header, re.MULTILINE)
        declared = []
        for parameter in found[1].split(","):
            kind = re.sub(r"\w+$", "", parameter.strip()).strip()
            pointer = kind not in types
            declared.append(ctypes.POINTER(types[kind.removesuffix("*").strip()]) if pointer else types[kind])
        assert getattr(library, name).argtypes == declared
        assert getattr(library, name).restype is ctypes.c_int
    for text in (
        "CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED = 113",
        "#define CU_MEMHOSTREGISTER_PORTABLE     0x01",
        "#define CU_MEMHOSTREGISTER_READ_ONLY    0x08",
        "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 0x1",
        "#define CU_IPC_HANDLE_SIZE 64",
    ):
        assert text in header
