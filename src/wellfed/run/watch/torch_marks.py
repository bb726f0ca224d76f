"""Sees from outside what a script does with torch: batches, copies, passes, steps of optimizers.

Replaces a few methods of classes while the watch lasts. Modules get no hooks: hooks would slow down each of their
submodules, be saved with a model, and make torch.compile compile again. The outermost modules are found from the
parameters of the first optimizers that step, and the ``__call__`` of their classes is replaced.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from wellfed.batches import BuildTime
from wellfed.errors import type_and_line
from wellfed.monitor.loop_watch import uses_cuda
from wellfed.run.watch.ranks_of_script import RankOfScript
from wellfed.run.watch.script_record import SeenLoader
from wellfed.run.watch.script_steps import ScriptSteps

_MOST_SEARCHES = 4
"""Maximum number of optimizers whose modules are searched for. A search takes about as long as a collection."""
_DESCRIBED_AT = 3
"""Number of the optimizer's step at which the script's ways of computing are recorded; passes before it show them."""
OTHER_LOADER = "Batches of a DataLoader could not be seen: the wait for them counts as time between steps."
NO_FORWARD = (
    "The forward pass is not told apart from what comes before: the model is called in compiled code, or no module "
    "with the optimizer's parameters was called."
)
NO_SETTINGS = "How the script computes (precision, TF32, compilation) could not be read."
_SHARDED = {"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}
"""Names of classes whose forward pass may gather weights from other ranks, and so wait for them."""
_DISPATCHER = "DataLoaderDispatcher.__iter__"
"""Function of Accelerate that reads batches on rank 0 and sends each rank its share."""


class TorchMarks:
    """Replaced methods of torch, from `install` to `remove`, which mark steps."""

    def __init__(self, steps: ScriptSteps, record: RankOfScript) -> None:
        self._steps, self._record = steps, record
        self._undo = ExitStack()
        self._seen: WeakKeyDictionary[Any, SeenLoader] = WeakKeyDictionary()
        """DataLoaders and their iterators."""
        self._optimizers: WeakSet[Any] = WeakSet()
        """Optimizers that have stepped."""
        self._classes: set[type] = set()
        """Classes of outermost modules whose calls are watched."""
        self._outermost = threading.local()
        """``is_within``: an outermost module runs in this thread. Another one than the watched may run a model, too."""
        self._sees_copies = self._has_autocast = self._is_compiled = self._is_sharded = self._convolves = False
        self._num_steps = 0

    def install(self) -> None:
        """Replaces the methods."""
        self._replace(DataLoader, "__iter__", self._iterates)
        self._replace(_BaseDataLoaderIter, "__next__", self._takes)
        self._replace(torch.autograd, "backward", functools.partial(_between, self._steps.backward))
        self._replace(torch, "save", functools.partial(_between, self._steps.saving))
        self._replace(torch.amp.autocast_mode.autocast, "__enter__", self._enters_autocast)
        if hasattr(torch.cuda.graphs.CUDAGraph, "replay"):
            self._replace(torch.cuda.graphs.CUDAGraph, "replay", functools.partial(_between, self._steps.replaying))
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
        original = getattr(owner, name)
        self._put(owner, name, functools.wraps(original)(make(original)))

    def _put(self, owner: Any, name: str, new: Any) -> None:
        is_own, before = name in vars(owner), vars(owner).get(name)
        setattr(owner, name, new)

        def restore() -> None:
            if vars(owner).get(name) is not new:
                return  # replaced by others since, who call ours
            if is_own:
                setattr(owner, name, before)
            else:
                delattr(owner, name)

        self._undo.callback(restore)

    @contextmanager
    def _noted(self, problem: str) -> Iterator[None]:
        """Records an error as something that could not be seen: loaders and modules may be of any kind."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  the script must not end by this
            self._record.note(f"{problem} ({type_and_line(error)})")

    def _iterates(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def iterate(loader: Any) -> Any:
            if self._steps.is_off:
                return original(loader)
            known: Any = None
            with self._noted(OTHER_LOADER):
                self._watch_copies()
                known = self._seen.get(loader)
                if known is None:
                    known = self._seen[loader] = SeenLoader(loader)
                    known.is_dispatched = sys._getframe(1).f_code.co_qualname == _DISPATCHER
            if known is None:
                return original(loader)
            self._steps.iterated(known)
            found = original(loader)
            with self._noted(OTHER_LOADER):
                self._seen[found] = known
            return found

        return iterate

    def _takes(self, original: Callable[..., Any]) -> Callable[..., Any]:
        steps, seen = self._steps, self._seen

        def take(iterator: Any) -> Any:
            loader = None
            with suppress(Exception):  # an iterator of any type; the record has the note of its beginning
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

    def _before_step(self, optimizer: Any, arguments: Any, named: Any) -> None:
        """Marks the begin of an optimizer's step, which may run a closure with passes of its own."""
        if not torch.compiler.is_compiling():
            has_closure = any(map(callable, (*arguments[1:], *named.values())))  # the first is the optimizer
            self._steps.optimizer(optimizer, is_done=False, has_closure=has_closure)

    def _after_step(self, optimizer: Any, arguments: Any, named: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._steps.optimizer(optimizer, is_done=True)
        if self._steps.is_off:
            return
        self._num_steps += 1
        with self._noted(NO_FORWARD):
            if optimizer not in self._optimizers and len(self._optimizers) < _MOST_SEARCHES:
                self._optimizers.add(optimizer)
                self._find_modules(optimizer)
        if self._num_steps == _DESCRIBED_AT:
            with self._noted(NO_SETTINGS):
                self._describe(optimizer)

    # Outermost modules

    def _find_modules(self, optimizer: Any) -> None:
        """Finds the outermost modules that the optimizer trains, and watches calls of their classes."""
        parameters = {id(one) for one in _parameters(optimizer)}
        trained = {id(one) for each in self._optimizers for one in _parameters(each)}
        self._steps.has_untrained = False
        has_compiled, is_watched = _has_compiled(), False
        for module in outermost_modules():
            if not any(id(one) in parameters for one in module.parameters()):
                self._steps.has_untrained |= not any(id(one) in trained for one in module.parameters())
                continue
            self._see_parts(module)
            if module._compiled_call_impl is not None or (has_compiled and not is_wrapper_of_compiled(module)):
                continue
            is_watched = True
            if isinstance(type(module).__call__, types.FunctionType) and type(module) not in self._classes:
                self._classes.add(type(module))
                self._watch_calls(type(module))
        if not is_watched:
            self._record.note(NO_FORWARD)

    def _see_parts(self, module: Any) -> None:
        """Notes how a trained module is compiled, or shared out among GPUs or ranks."""
        for name, part in module.named_modules():
            self._is_compiled |= part._compiled_call_impl is not None or "_orig_mod" in part._modules
            if isinstance(part, torch.nn.DataParallel):
                self._record.data_parallel(name or type(part).__name__, len(part.device_ids))
            self._is_sharded |= any(kind.__name__ in _SHARDED for kind in type(part).__mro__)
            if isinstance(part, torch.nn.modules.conv._ConvNd):  # of patches: a product, and the least of its model's
                self._convolves |= part.kernel_size != part.stride

    def _describe(self, optimizer: Any) -> None:
        """Records how the script computes, by the names that configurations have for it."""
        parameters = _parameters(optimizer)
        is_float32 = all(one.dtype == torch.float32 for one in parameters) and not self._has_autocast
        tf32 = _multiplies_in_tf32()
        gpu = {
            # Sharded weights of float32 may compute in another type, which no autocast shows.
            **({} if is_float32 and self._is_sharded else {"precision": "32-true" if is_float32 else "mixed"}),
            # Convolutions have a setting of their own: where they alone may use TF32, neither value is true.
            **({"tf32": tf32} if tf32 or not (self._convolves and _convolves_in_tf32()) else {}),
            "compile": "default" if self._is_compiled or _has_compiled() else "none",
        }
        sizes = [one.numel() for one in parameters]
        trainer = {"trainer": {"strategy": "fsdp"}} if self._is_sharded else {}
        self._record.model({"gpu": gpu, **trainer}, len(sizes), sum(sizes))

    def _watch_calls(self, kind: Any) -> None:
        original, steps = kind.__call__, self._steps

        @functools.wraps(original)
        def outermost(module: Any, *arguments: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling() or self._is_within() or steps.is_off:
                return original(module, *arguments, **named)
            self._outermost.is_within = True
            steps.forward()
            try:
                return original(module, *arguments, **named)
            finally:
                self._outermost.is_within = False
                steps.forward(is_done=True)

        self._put(kind, "__call__", outermost)

    def _is_within(self) -> bool:
        return getattr(self._outermost, "is_within", False)

    # Copies

    def _watch_copies(self) -> None:
        """Watches copies to a device, from the first use of one on."""
        if self._sees_copies or not uses_cuda():
            return
        self._sees_copies = True
        for name in ("to", "cuda"):
            self._replace(torch.Tensor, name, self._copies)

    def _copies(self, original: Any) -> Callable[..., Any]:
        steps = self._steps

        def copied(tensor: Any, *arguments: Any, **named: Any) -> Any:
            if steps.is_off or self._is_within() or tensor.is_cuda:
                return original(tensor, *arguments, **named)
            steps.copying(is_done=False)
            found = original(tensor, *arguments, **named)
            if getattr(found, "is_cuda", False):
                steps.copying(is_done=True)
            return found

        return copied


def outermost_modules() -> list[Any]:
    """Returns the modules with parameters that are part of no other."""
    module_type = torch.nn.Module
    modules = [one for one in gc.get_objects() if issubclass(type(one), module_type) and "_modules" in vars(one)]
    inner = {id(child) for one in modules for child in vars(one)["_modules"].values()}
    return [one for one in modules if id(one) not in inner and next(one.parameters(), None) is not None]


def is_wrapper_of_compiled(module: Any) -> bool:
    """Returns whether a module is, or wraps, what torch.compile returned, and is called outside of compiled code."""
    return any("_orig_mod" in vars(one).get("_modules", {}) for one in (module, *module.children()))


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


def _parameters(optimizer: Any) -> list[Any]:
    return [one for group in optimizer.param_groups for one in group["params"]]
