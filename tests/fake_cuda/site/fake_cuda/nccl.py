"""A process group "nccl" for the simulated cards: Gloo on the memory of their tensors."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import torch


def fill_in(driver: ModuleType) -> None:
    """A process group "nccl" for the fake devices: Gloo on the memory of the tensors."""
    if not torch.distributed.is_available():
        return
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    class Done(dist._Work):
        def __init__(self, result):
            super().__init__()
            self._future = torch.futures.Future(devices=[result[0].device] if result and result[0].is_cuda else None)
            self._future.set_result(result)

        def wait(self, timeout=None):
            return True

        def is_completed(self):
            return True

        def get_future(self):
            return self._future

    class FakeNccl(dist.ProcessGroup):
        class Options(SimpleNamespace):
            """What ProcessGroupNCCL can be told."""

        def __init__(self, store, rank, size, options):
            super().__init__(rank, size)
            self._store, self._rank, self._size = store, rank, size
            self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
            self._device, self._name = None, ""

        def _set_sequence_number_for_group(self):
            pass

        supports_splitting = False
        _device_types = [torch.device("cuda")]

        def _get_backend(self, device):
            return self

        def _set_group_name(self, name):
            self._name = name

        def _set_group_desc(self, description):
            pass

        def getBackendName(self):
            return "nccl"

        @property
        def group_name(self):
            return self._name

        def _on_card(self, tensors):
            for tensor in tensors:
                if not tensor.is_cuda:
                    raise RuntimeError("No backend type associated with device type cpu")
            if self._device is None and tensors:  # NCCL: one rank a card
                self._device = tensors[0].get_device()
                self._store.set(f"fake_nccl/{self._rank}", str(self._device))
                all_ranks = [self._store.get(f"fake_nccl/{rank}").decode() for rank in range(self._size)]
                if len(set(all_ranks)) < self._size:
                    raise RuntimeError(f"Duplicate GPU detected : ranks are on the CUDA devices {all_ranks}")

        def _do(self, name, *arguments, result):
            flat = [each for argument in arguments if isinstance(argument, (list, tuple)) for each in _flat(argument)]
            flat += [each for each in arguments if isinstance(each, torch.Tensor)]
            self._on_card(flat)
            getattr(self._gloo, name)(*(_host(argument) for argument in arguments)).wait()
            return Done(result)

        def allreduce(self, tensors, opts=None):
            opts = opts or dist.AllreduceOptions()
            is_mean = opts.reduceOp == dist.ReduceOp.AVG
            if is_mean:
                opts.reduceOp = dist.ReduceOp.SUM
            done = self._do("allreduce", tensors, opts, result=tensors)
            if is_mean:
                for tensor in tensors:
                    tensor.div_(self._size)
            return done

        def broadcast(self, tensors, opts=None):
            return self._do("broadcast", tensors, opts or dist.BroadcastOptions(), result=tensors)

        def allgather(self, outputs, inputs, opts=None):
            return self._do("allgather", outputs, inputs, opts or dist.AllgatherOptions(), result=outputs[0])

        def reduce_scatter(self, outputs, inputs, opts=None):
            return self._do("reduce_scatter", outputs, inputs, opts or dist.ReduceScatterOptions(), result=outputs)

        def _allgather_base(self, output, input, opts=None):
            return self._do("_allgather_base", output, input, opts or dist.AllgatherOptions(), result=[output])

        def _reduce_scatter_base(self, output, input, opts=None):
            opts = opts or dist.ReduceScatterOptions()
            is_mean = opts.reduceOp == dist.ReduceOp.AVG
            if is_mean:
                opts.reduceOp = dist.ReduceOp.SUM
            done = self._do("_reduce_scatter_base", output, input, opts, result=[output])
            if is_mean:
                output.div_(self._size)
            return done

        all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # their names since torch 2.13

        def barrier(self, opts=None):
            self._gloo.barrier().wait()
            return Done([])

    def _flat(tensors):
        for each in tensors:
            if isinstance(each, torch.Tensor):
                yield each
            else:
                yield from _flat(each)

    def _host(value):
        if isinstance(value, torch.Tensor):
            return driver.host_view(value, True)
        if isinstance(value, (list, tuple)):
            return [_host(each) for each in value]
        return value

    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = FakeNccl
    c10d._NCCL_AVAILABLE = True
