"""Arrays whose memory is not XLA's: allocated by the driver and lent to JAX through DLPack."""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import numpy as np

_CPU, _CUDA = 1, 2  # DLDeviceType
_FLOAT = 2  # DLDataTypeCode
_ALIGN = 256


class _Tensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_kept: list[Any] = []  # until the process ends
# The deleter must be a function, and may be called when Python has ended: one of C, without effect.
_DELETER = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p)


class _Lent:
    def __init__(self, tensor: _Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._tensor), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.device_type, self._tensor.device_id


def array_of(data: np.ndarray, device: Any) -> jax.Array:
    """`data` (float32) on `device`, in memory that XLA's allocator has never seen."""
    assert data.dtype == np.float32
    data = np.ascontiguousarray(data)
    on_gpu = device.platform == "gpu"
    address = _copy_to_gpu(data, device) if on_gpu else _copy_on_host(data)
    shape = (ctypes.c_int64 * data.ndim)(*data.shape)
    tensor = _Tensor(
        data=address,
        device_type=_CUDA if on_gpu else _CPU,
        device_id=device.local_hardware_id if on_gpu else 0,
        ndim=data.ndim,
        type_code=_FLOAT,
        type_bits=32,
        type_lanes=1,
        shape=shape,
        deleter=_DELETER,
    )
    _kept.extend((tensor, shape))
    array = jax.dlpack.from_dlpack(_Lent(tensor))
    assert array.unsafe_buffer_pointer() == address, "JAX copied the memory"
    return array


def _copy_on_host(data: np.ndarray) -> int:
    memory = ctypes.create_string_buffer(data.nbytes + _ALIGN)
    address = -(-ctypes.addressof(memory) // _ALIGN) * _ALIGN
    ctypes.memmove(address, data.ctypes.data, data.nbytes)
    _kept.append(memory)
    return address


def _copy_to_gpu(data: np.ndarray, device: Any) -> int:
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        result = getattr(cuda, name)(*arguments)
        assert result == 0, f"{name} failed: {result}"

    handle, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(handle), device.local_hardware_id)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    call("cuCtxPushCurrent_v2", context)
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(data.nbytes))
    source = ctypes.c_void_p(data.ctypes.data)
    call("cuMemcpyHtoD_v2", address, source, ctypes.c_size_t(data.nbytes))
    call("cuCtxPopCurrent_v2", ctypes.byref(context))
    return int(address.value or 0)
