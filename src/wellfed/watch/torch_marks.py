"""Sees from outside what a script does with torch: batches, copies, backward passes, steps of optimizers.

Replaces a few methods of classes while the watch lasts. Modules are left alone: hooks would slow down each of their
submodules, be saved with a model, and make torch.compile compile again.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from wellfed.batches import BuildTime
from wellfed.watch.ranks_of_script import RankOfScript
from wellfed.watch.script_record import SeenLoader
from wellfed.watch.script_steps import ScriptSteps

_DESCRIBED_AT = 3
"""Number of the optimizer's step at which the script's ways of computing are recorded; passes before it show them."""
OTHER_LOADER = "Batches of a DataLoader could not be seen: the wait for them counts as time between steps."
_SHARDED = {"DTensor", "FlatParameter"}
"""Types of parameters that are spread over ranks. The forward pass gathers them, and so waits for other ranks."""


class TorchMarks:
    """Replaced methods of torch, from `install` to `remove`, which mark steps."""

    def __init__(self, steps: ScriptSteps, record: RankOfScript) -> None:
        self._steps, self._record = steps, record
        self._undo = ExitStack()
        self._seen: WeakKeyDictionary[Any, SeenLoader] = WeakKeyDictionary()
        """DataLoaders and their iterators."""
        self._sees_copies = self._has_autocast = False
        self._parallel: tuple[str, int] | None = None
        """Class and number of GPUs of a model that one process spreads over them."""
        self._num_steps = 0

    def install(self) -> None:
        """Replaces the methods."""
        self._replace(DataLoader, "__iter__", self._iterates)
        self._replace(_BaseDataLoaderIter, "__next__", self._takes)
        self._replace(torch.autograd, "backward", functools.partial(_between, self._steps.backward))
        self._replace(torch, "save", functools.partial(_between, self._steps.saving))
        self._replace(torch.amp.autocast_mode.autocast, "__enter__", self._enters_autocast)
        self._replace(torch.nn.DataParallel, "scatter", self._scatters)
        for hook in (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            self._undo.callback(hook.remove)

    def remove(self) -> None:
        """Restores the methods."""
        self._undo.close()

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        """Replaces a method or function by what ``make`` returns for it."""
        original, is_own = getattr(owner, name), name in vars(owner)
        new = functools.wraps(original)(make(original))
        setattr(owner, name, new)

        def restore() -> None:
            if vars(owner).get(name) is not new:
                return  # replaced by others since, who call ours
            if is_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

        self._undo.callback(restore)

    def _iterates(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def iterate(loader: Any) -> Any:
            known: SeenLoader | None = None
            if not self._steps.is_off:
                self._watch_copies()
                try:
                    known = self._seen.setdefault(loader, SeenLoader(loader))
                    self._steps.iterated(known)
                except TypeError:  # a loader without a hash
                    self._record.note(OTHER_LOADER)
            found = original(loader)
            if known is not None:
                if isinstance(found, _BaseDataLoaderIter):
                    self._seen[found] = known
                else:
                    self._record.note(OTHER_LOADER)
            return found

        return iterate

    def _takes(self, original: Callable[..., Any]) -> Callable[..., Any]:
        steps, seen = self._steps, self._seen

        def take(iterator: Any) -> Any:
            loader = None if steps.is_off else seen.get(iterator)
            if loader is None:
                return original(iterator)
            steps.asked(loader)
            began_s, cpu_began_s = time.perf_counter(), time.thread_time()
            try:
                batch = original(iterator)
            except StopIteration:
                steps.exhausted(loader)
                raise
            took = None
            if loader.settings["num_workers"] == 0:
                cpu_ms = 1e3 * (time.thread_time() - cpu_began_s)
                took = BuildTime(1e3 * (time.perf_counter() - began_s), cpu_ms)
            steps.got(loader, batch, took)
            return batch

        return take

    def _enters_autocast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(autocast: Any) -> Any:
            if not torch.compiler.is_compiling() and torch.is_grad_enabled():
                self._has_autocast |= autocast.device == "cuda" and autocast._enabled
            return original(autocast)

        return enter

    def _scatters(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scatter(module: Any, *arguments: Any, **named: Any) -> Any:
            self._parallel = type(module).__name__, len(module.device_ids)
            return original(module, *arguments, **named)

        return scatter

    def _before_step(self, optimizer: Any, arguments: Any, named: Any) -> None:
        """Marks the begin of an optimizer's step, which may run a closure with passes of its own."""
        if not torch.compiler.is_compiling():
            has_closure = any(map(callable, (*arguments[1:], *named.values())))  # the first is the optimizer
            self._steps.optimizer(optimizer, is_done=False, has_closure=has_closure)

    def _after_step(self, optimizer: Any, arguments: Any, named: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._steps.optimizer(optimizer, is_done=True)
        self._watch_copies()
        self._num_steps += 1
        if self._num_steps == _DESCRIBED_AT and not self._steps.is_off:
            self._describe([one for group in optimizer.param_groups for one in group["params"]])

    def _describe(self, parameters: list[torch.Tensor]) -> None:
        """Records how the script computes, by the names that configurations have for it."""
        is_float32 = all(one.dtype == torch.float32 for one in parameters) and not self._has_autocast
        is_sharded = any(type(one).__name__ in _SHARDED for one in parameters)
        sizes = [one.numel() for one in parameters]
        convolved = sum(one.numel() for one in parameters if one.ndim > 3)
        tf32 = _multiplies_in_tf32()
        gpu = {
            # Sharded weights of float32 may compute in another type, which no autocast shows.
            **({} if is_float32 and is_sharded else {"precision": "32-true" if is_float32 else "mixed"}),
            # Convolutions have a setting of their own: where they are the most and alone may use TF32, neither is true.
            **({"tf32": tf32} if tf32 or 2 * convolved < sum(sizes) or not _convolves_in_tf32() else {}),
            "compile": "default" if _has_compiled() else "none",
        }
        trainer = {"trainer": {"strategy": "fsdp"}} if is_sharded else {}
        self._record.model({"gpu": gpu, **trainer}, sum(sizes))
        if self._parallel is not None:
            self._record.data_parallel(*self._parallel)

    # Copies

    def _watch_copies(self) -> None:
        """Watches copies to a device, from the first use of one on."""
        if not self._sees_copies and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._sees_copies = True
            for name in ("to", "cuda"):
                self._replace(torch.Tensor, name, self._copies)

    def _copies(self, original: Any) -> Callable[..., Any]:
        steps = self._steps

        def copied(tensor: Any, *arguments: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling() or steps.is_off or tensor.is_cuda:
                return original(tensor, *arguments, **named)
            steps.copying(is_done=False)
            found = original(tensor, *arguments, **named)
            if getattr(found, "is_cuda", False):
                steps.copying(is_done=True)
            return found

        return copied


def _between(mark: Callable[..., None], original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that marks its begin and its end."""

    def marked(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*arguments, **named)
        mark(is_done=False)
        try:
            return original(*arguments, **named)
        finally:
            mark(is_done=True)

    return marked


def _has_compiled() -> bool:
    """Returns whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("frames"))


def _multiplies_in_tf32() -> bool:
    """Returns whether matrix products of float32 may use TF32. The older function raises after the newer setting."""
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")  # torch >= 2.9
    return newer != "ieee" if newer != "none" else torch.get_float32_matmul_precision() != "highest"


def _convolves_in_tf32() -> bool:
    """Returns whether convolutions of float32 may use TF32, as they do unless a script forbids it."""
    convolution = getattr(torch.backends.cudnn, "conv", None)  # torch >= 2.9
    return torch.backends.cudnn.allow_tf32 if convolution is None else convolution.fp32_precision == "tf32"
