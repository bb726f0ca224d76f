import errno
import weakref

import numpy as np
import pytest
import torch

from wellfed.train.memory.oom import attempt, classify, lost_worker

NCCL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO "
    "for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)
ASYNCHRONOUS = "\nCUDA kernel errors might be asynchronously reported at some other API call"
IN_WORKER = "Caught RuntimeError in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n"

TABLE = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), "device_oom"),
    (torch.AcceleratorError(f"CUDA error: out of memory{ASYNCHRONOUS}"), "device_oom"),
    (RuntimeError("CUDA driver error: out of memory"), "device_oom"),
    (RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"), "device_oom"),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "device_oom"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), None),
    (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa)`"), None),
    (RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm( handle, opa)`"), None),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "device_oom"),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), "device_oom"),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"), "host_oom"),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), None),
    (RuntimeError("GET was unable to find an engine to execute this computation"), None),
    (RuntimeError("cuDNN error: CUDNN_STATUS_BAD_PARAM"), None),
    (RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `f`. If you keep"), "device_oom"),
    (RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `f`. If you keep"), None),
    (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), "device_oom"),
    (RuntimeError("cuFFT error: CUFFT_INVALID_SIZE"), None),
    (RuntimeError("CUDA error: insufficient resources when calling `cusparseSpGEMM_workEstimation( h)`"), "device_oom"),
    (RuntimeError(f"{NCCL}Cuda failure 2 'out of memory'"), "device_oom"),
    (RuntimeError(f"{NCCL}Cuda failure 'out of memory'"), "device_oom"),
    (RuntimeError(f"{NCCL}Cuda failure 1 'invalid argument'"), None),
    (RuntimeError(f"{NCCL}Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 96)"), "host_oom"),
    # the host's allocators
    (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), "host_oom"),
    (RuntimeError("$ Torch: unable to mmap memory: you tried to mmap 64GB."), "host_oom"),
    (RuntimeError("std::bad_alloc"), "host_oom"),
    (MemoryError(), "host_oom"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "host_oom"),
    (OSError(errno.ENOSPC, "No space left on device"), None),
    # a bus error, for want of /dev/shm, and other workers that were killed
    (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that"), "worker"),
    (RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"), "worker"),
    (RuntimeError("ERROR: Unexpected bus error encountered in worker. This might be caused by"), "worker"),
    (RuntimeError("unable to mmap 32 bytes from file </torch_23_16>: Cannot allocate memory (12)"), "worker"),
    (RuntimeError(f"{IN_WORKER}RuntimeError: unable to write to file </torch_12_34_5>: No space left (28)"), "worker"),
    (RuntimeError("unable to allocate shared memory(shm) for file </torch_12_34_5>: Success (0)"), "worker"),
    (RuntimeError(f"{IN_WORKER}RuntimeError: bug"), None),
    # other errors
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
    (ValueError("CUDA out of memory"), None),  # text of someone else's
    (RuntimeError("a parser: std::bad_alloc is not handled"), None),
]


@pytest.mark.parametrize(("error", "kind"), TABLE, ids=lambda value: str(value)[:60])
def test_what_an_error_says_of_memory(error, kind):
    found = classify(error)
    assert (found and found.kind) == (None if kind == "worker" else kind)
    assert (lost_worker(error) is not None) == (kind == "worker")


def test_host_memory_by_real_allocations_that_fail():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    found = classify(caught.value)
    assert found.kind == "host_oom"
    assert "DefaultCPUAllocator" in found.message
    for allocate in (lambda: bytearray(2**62), lambda: np.empty(2**57)):
        with pytest.raises(MemoryError) as python:
            allocate()
        assert classify(python.value).kind == "host_oom"


def test_a_size_that_overflows_is_a_fault_of_the_code():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, 2**5)
    assert classify(caught.value) is None


def test_only_the_line_that_tells_is_kept():
    assert classify(torch.OutOfMemoryError("one\ntwo")).message == "one"
    assert classify(MemoryError()).message == "MemoryError"
    killed = RuntimeError(
        f"{IN_WORKER}RuntimeError: unable to write to file </torch_1_2>: No space left on device (28)"
    )
    assert lost_worker(killed) == "RuntimeError: unable to write to file </torch_1_2>: No space left on device (28)"


def test_an_attempt_keeps_nothing_of_what_ran_out():
    kept = []

    def work(size):
        held = torch.zeros(size)
        kept.append(weakref.ref(held))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    result, failure = attempt(work, 3)
    assert (result, failure.kind) == (None, "device_oom")
    assert kept[0]() is None
    assert attempt(int, "3") == (3, None)
    with pytest.raises(ValueError, match="invalid literal"):
        attempt(int, "x")
