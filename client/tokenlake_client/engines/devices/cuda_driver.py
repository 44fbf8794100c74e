"""The calls of CUDA's driver API that torch does not offer: page locks, and device memory of several processes.

The declarations are those of cuda.h (CUDA 12 and 13), with the `_v2` names that its macros choose. Errors of the driver
API are results only. The runtime API, which torch uses, keeps the last error of a thread, and the thread's next launch
of a kernel raises it: a failed `cudaHostRegister` ends an unrelated operation.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

from tokenlake_client.engines.devices.base import DeviceFailed

READ_ONLY_HOST_REGISTER_SUPPORTED = 113
"""CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED."""
PORTABLE, READ_ONLY = 0x01, 0x08
"""CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_READ_ONLY."""
LAZY_PEER_ACCESS = 0x1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, which cuIpcOpenMemHandle requires."""
HANDLE_BYTES = 64
"""CU_IPC_HANDLE_SIZE."""


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


_int, _void, _address, _size = ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
_CALLS: dict[str, list[Any]] = {
    "cuInit": [ctypes.c_uint],
    "cuDeviceGet": [ctypes.POINTER(_int), _int],
    "cuDeviceGetAttribute": [ctypes.POINTER(_int), _int, _int],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(_void), _int],
    "cuCtxPushCurrent_v2": [_void],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(_void)],
    "cuMemHostRegister_v2": [_void, _size, ctypes.c_uint],
    "cuMemHostUnregister": [_void],
    "cuMemAlloc_v2": [ctypes.POINTER(_address), _size],
    "cuMemFree_v2": [_address],
    "cuIpcGetMemHandle": [ctypes.POINTER(_IpcHandle), _address],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(_address), _IpcHandle, ctypes.c_uint],
    "cuIpcCloseMemHandle": [_address],
    "cuGetErrorName": [_int, ctypes.POINTER(ctypes.c_char_p)],
}
"""The parameters of each call; every call returns a CUresult."""


class CudaDriver:
    """One GPU in the driver API. All methods may be called in any thread, and raise `DeviceFailed`.

    The methods push the GPU's primary context, which torch uses too, and pop it: a new thread has no current context,
    and torch makes none where the thread's default GPU is the one that it uses. Their memory is thus torch's memory,
    and locks count for torch's copies. The context is retained for the life of the process.
    """

    def __init__(self, number: int, library: Any = None) -> None:
        """`number`: of the GPU, as torch counts them. `library`: libcuda, which comes with the GPU's kernel driver."""
        if library is None:
            try:
                library = ctypes.CDLL("libcuda.so.1")
            except OSError as error:
                raise DeviceFailed(f"CUDA's driver cannot be loaded: {error}") from error
        for name, parameters in _CALLS.items():
            call = getattr(library, name)
            call.argtypes, call.restype = parameters, _int
        self._library = library
        device, context = _int(), _void()
        # cuInit precedes every other call of the driver API; torch's own call does not count where its CUDA runtime
        # was loaded and not yet used. It may be repeated.
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), number)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._device, self._context = device, context

    def lock(self, address: int, nbytes: int, *, write: bool) -> None:
        """Page-lock mapped memory of the host.

        cuMemHostRegister requires: memory that is mapped and not registered (`MappedMemory` registers each mapping
        once, and the driver refuses a second time); for memory that is mapped read-only the flag READ_ONLY, which
        requires the attribute that is asked for here, and without which the driver refuses. PORTABLE: locked for all
        GPUs of the process.
        """
        flags = PORTABLE
        if not write:
            supported = _int()
            self._call("cuDeviceGetAttribute", ctypes.byref(supported), READ_ONLY_HOST_REGISTER_SUPPORTED, self._device)
            if not supported.value:
                raise DeviceFailed("the GPU cannot read page-locked memory that is mapped read-only")
            flags |= READ_ONLY
        with self._current():
            self._call("cuMemHostRegister_v2", address, nbytes, flags)

    def unlock(self, address: int) -> None:
        """End a page lock.

        cuMemHostUnregister requires: the address that was registered, still mapped (`MappedMemory` calls this before
        it unmaps), and no copy under way (arrays over the mapping live until `Stream.synchronize`).
        """
        with self._current():
            self._call("cuMemHostUnregister", address)

    def allocate(self, nbytes: int) -> int:
        """Allocate memory of the GPU with cuMemAlloc, whose allocations cuIpcGetMemHandle accepts. Returns its
        address."""
        address = _address()
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        return int(address.value)

    def free(self, address: int) -> None:
        """Free memory of `allocate`. Undefined while another process has it open (cuIpcOpenMemHandle)."""
        with self._current():
            self._call("cuMemFree_v2", address)

    def handle(self, address: int) -> bytes:
        """The handle of an allocation. cuIpcGetMemHandle requires the base address of memory of cuMemAlloc, which
        `allocate` returns, and a GPU with unified addressing on Linux."""
        handle = _IpcHandle()
        with self._current():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map another process's memory; returns its address here.

        cuIpcOpenMemHandle requires: a handle of another process; one context per GPU that opens handles (all here use
        the primary one); the flag LAZY_PEER_ACCESS. A handle that is opened twice counts references: each `open` needs
        a `close`.
        """
        if len(handle) != HANDLE_BYTES:
            raise DeviceFailed(f"a handle of {len(handle)} bytes; expected {HANDLE_BYTES}")
        address = _address()
        with self._current():
            opened = _IpcHandle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, LAZY_PEER_ACCESS)
        return int(address.value)

    def close(self, address: int) -> None:
        """Unmap memory of `open`. cuIpcCloseMemHandle requires the address that cuIpcOpenMemHandle returned."""
        with self._current():
            self._call("cuIpcCloseMemHandle", address)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(_void()))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise DeviceFailed(f"{name}: {(text.value or b'').decode() or code}")
