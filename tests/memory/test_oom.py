import errno

import pytest
import torch

from wellfed.memory.oom import classify

NCCL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO "
    "for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        torch.OutOfMemoryError(""),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError(NCCL + "Cuda failure 2 'out of memory'"),
        RuntimeError(NCCL + "Cuda failure 'out of memory'"),
    ],
)
def test_device_memory(error):
    assert classify(error).kind == "device_oom"


def test_host_memory_by_a_real_allocation_that_fails():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    found = classify(caught.value)
    assert found.kind == "host_oom"
    assert "DefaultCPUAllocator" in found.message
    with pytest.raises(MemoryError) as python:
        bytearray(2**62)
    assert classify(python.value).kind == "host_oom"
    assert classify(OSError(errno.ENOMEM, "Cannot allocate memory")).kind == "host_oom"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError(NCCL + "Cuda failure 1 'invalid argument'"),
        ValueError("CUDA out of memory"),  # text of someone else's
        OSError(errno.ENOSPC, "No space left on device"),
        KeyboardInterrupt(),
    ],
)
def test_what_is_no_memory_error(error):
    assert classify(error) is None


def test_a_size_that_overflows_is_a_fault_of_the_code():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, 2**5)
    assert classify(caught.value) is None


def test_only_the_first_line_is_kept():
    assert classify(torch.OutOfMemoryError("one\ntwo")).message == "one"
    assert classify(MemoryError()).message == "MemoryError"
