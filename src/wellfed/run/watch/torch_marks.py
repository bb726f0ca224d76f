"""Sees from outside what a script does with torch: batches, copies, passes, steps of optimizers.

Replaces a few methods of classes while the watch lasts. Modules get no hooks: hooks would slow down each of their
submodules, be saved with a model, and make torch.compile compile again. The outermost modules are found from the
parameters of the first optimizer that steps, and the ``__call__`` of their classes is replaced.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import threading
import time
import types
from collections.abc import Callable
from contextlib import ExitStack, suppress
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
from wellfed.run.watch.script_steps import ScriptSteps, world_size

_MOST_SEARCHES = 4
"""Maximum number of optimizers whose modules are searched for; one that is gone counts no longer. A search takes about
as long as a collection."""
_DESCRIBED_AT = 3
"""Number of the optimizer's step at which the script's ways of computing are recorded; passes before it show them."""
UNTRAINED = "Untrained models are not watched where code is compiled: their forward pass, if any, is not told apart."
COMPILED = "The model, or code that calls it, is compiled: its forward pass is not told apart from what comes before."
OTHER_LOADER = "Batches of a DataLoader could not be seen: the wait for them counts as time between steps."
NO_MODULE = "No module was called that holds the optimizer's parameters: its forward pass is not told apart."
NO_SETTINGS = "How the script computes (precision, TF32, compilation) could not be read."
MANY_OPTIMIZERS = (
    f"More than {_MOST_SEARCHES} optimizers step: forward passes of what only later ones train may be unseen."
)
_SHARDED = {"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}
"""Names of classes whose forward pass may gather weights from other ranks, and so wait for them."""
_DISPATCHER = "DataLoaderDispatcher.__iter__"
"""Function of Accelerate that reads batches on rank 0 and sends each rank its share."""
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
"""Types of the closures that are marked. Another callable may have attributes that an optimizer reads."""


class _OfThread(threading.local):
    """State of each thread. Another one than the watched may run a model, too."""

    is_within = False
    """An outermost module runs."""


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
        self._trained: set[type] = set()
        """Classes of outermost modules with parameters of an optimizer. Others are a teacher's, for instance."""
        self._here = _OfThread()
        self._sees_copies = self._has_autocast = self._is_compiled = self._is_sharded = self._convolves = False
        self._num_steps = 0

    def install(self) -> None:
        """Replaces the methods."""
        self._replace(DataLoader, "__iter__", self._iterates)
        self._replace(_BaseDataLoaderIter, "__next__", self._takes)
        self._replace(torch.autograd, "backward", self._goes_back)
        self._replace(torch, "save", self._saves)
        self._replace(torch.amp.autocast_mode.autocast, "__enter__", self._enters_autocast)
        if hasattr(torch.cuda.graphs.CUDAGraph, "replay"):
            self._replace(torch.cuda.graphs.CUDAGraph, "replay", self._replays)
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

    def _iterates(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def iterate(loader: Any) -> Any:
            if self._steps.is_off:
                return original(loader)
            known = self._begun(loader, sys._getframe(1).f_code.co_qualname)
            found = original(loader)
            try:
                if known is not None:
                    self._seen[found] = known
            except Exception as error:  # noqa: BLE001  an iterator of any type
                self._record.note(f"{OTHER_LOADER} ({type_and_line(error)})")
            return found

        return iterate

    def _begun(self, loader: Any, caller: str) -> SeenLoader | None:
        """Marks that a function begins a pass over a DataLoader. Returns None if that cannot be recognised."""
        try:
            self._watch_copies()
            known = self._seen.get(loader)
            if known is None:
                known = self._seen[loader] = SeenLoader(loader)
                known.is_dispatched = caller == _DISPATCHER
        except Exception as error:  # noqa: BLE001  a subclass of any kind, and the script must not end by this
            self._record.note(f"{OTHER_LOADER} ({type_and_line(error)})")
            return None
        self._steps.iterated(known)
        return known

    def _takes(self, original: Callable[..., Any]) -> Callable[..., Any]:
        steps, seen = self._steps, self._seen

        def take(iterator: Any) -> Any:
            try:
                loader = None if steps.is_off else seen.get(iterator)
            except Exception:  # noqa: BLE001  an iterator of any type; the record has the note of its beginning
                loader = None
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

    def _goes_back(self, original: Callable[..., Any]) -> Callable[..., Any]:
        steps = self._steps

        def backward(*arguments: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling() or steps.is_off:
                return original(*arguments, **named)
            steps.backward()
            try:
                return original(*arguments, **named)
            finally:
                steps.backward(is_done=True)

        return backward

    def _saves(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return _between(self._steps.saving, original)

    def _enters_autocast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(autocast: Any) -> Any:
            if (
                not torch.compiler.is_compiling() and torch.is_grad_enabled()
            ):  # anywhere, also in a model's forward pass
                self._has_autocast |= autocast.device == "cuda" and autocast._enabled
            return original(autocast)

        return enter

    def _replays(self, original: Callable[..., Any]) -> Callable[..., Any]:
        steps = self._steps

        def replay(graph: Any) -> Any:
            steps.replayed()
            return original(graph)

        return replay

    def _before_step(self, optimizer: Any, arguments: Any, named: Any) -> Any:
        """Marks the begin of an optimizer's step. Returns its arguments with a closure that marks itself, if any."""
        if torch.compiler.is_compiling() or self._steps.is_off:
            return None
        marked = self._with_closure(optimizer, arguments, named)
        self._steps.optimizer(optimizer, is_done=False, has_closure=marked is not None)
        return marked

    def _with_closure(self, optimizer: Any, arguments: Any, named: Any) -> Any:
        """Returns the arguments of an optimizer's step with a closure that marks itself; None without one."""
        if isinstance(named.get("closure"), _FUNCTIONS):
            return arguments, {**named, "closure": _between(self._steps.closure, named["closure"])}
        # The first of the arguments is the optimizer.
        if len(arguments) > 1 and isinstance(arguments[1], _FUNCTIONS) and _takes_closure(type(optimizer)):
            return (arguments[0], _between(self._steps.closure, arguments[1]), *arguments[2:]), named
        return None

    def _after_step(self, optimizer: Any, arguments: Any, named: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._steps.optimizer(optimizer, is_done=True)
        if self._steps.is_off:
            return
        self._num_steps += 1
        try:
            if optimizer not in self._optimizers:
                self._optimizers.add(optimizer)
                if len(self._optimizers) <= _MOST_SEARCHES:
                    self._find_modules(optimizer)
                else:
                    self._record.note(MANY_OPTIMIZERS)
        except Exception as error:  # noqa: BLE001  modules of any kind, and the script must not end by this
            self._record.note(f"{NO_MODULE} ({type_and_line(error)})")
        try:
            if self._num_steps == _DESCRIBED_AT:
                self._describe(optimizer)
        except Exception as error:  # noqa: BLE001  likewise
            self._record.note(f"{NO_SETTINGS} ({type_and_line(error)})")

    # Outermost modules

    def _find_modules(self, optimizer: Any) -> None:
        """Finds the outermost modules, and watches calls of their classes. The optimizer trains some of them."""
        parameters = {id(one) for one in _parameters(optimizer)}
        found = [(one, any(id(each) in parameters for each in one.parameters())) for one in outermost_modules()]
        self._trained.update(type(one) for one, is_trained in found if is_trained)
        # A module that wraps one of these classes, such as an average of the weights, is called as they are.
        for module, _ in found:
            if any(type(one) in self._trained for one in module.modules()):
                self._trained.add(type(module))
        has_compiled = _has_compiled()
        for module, is_trained in found:
            kind = type(module)
            may_watch = module._compiled_call_impl is None and (not has_compiled or is_wrapper_of_compiled(module))
            may_watch &= is_trained or not isinstance(module, torch.jit.ScriptModule)
            if is_trained:
                self._see_wrappers(module)
                self._is_compiled |= _is_compiled(module)
                if not may_watch:
                    self._record.note(COMPILED)
            elif not may_watch and _is_model(module):
                self._record.note(UNTRAINED)
            if may_watch and kind not in self._classes and (is_trained or _is_model(module)):
                self._classes.add(kind)
                self._watch_calls(kind)
        if not any(is_trained for _, is_trained in found):
            self._record.note(NO_MODULE)
        if world_size() > 1 and _sharded_dimensions(_parameters(optimizer)) > self._is_sharded:
            self._record.shares_batches()

    def _see_wrappers(self, module: Any) -> None:
        """Notes how a trained module is shared out among GPUs or ranks."""
        for name, part in module.named_modules():
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
        own, steps = vars(kind).get("__call__"), self._steps
        bound = getattr(type(own), "__get__", lambda own, module: own)  # as Python calls what is no descriptor

        def outermost(module: Any, *arguments: Any, **named: Any) -> Any:
            call = super(kind, module).__call__ if own is None else bound(own, module)  # type: ignore[misc]
            if torch.compiler.is_compiling() or self._here.is_within or steps.is_off:
                return call(*arguments, **named)
            self._here.is_within = True
            is_trained = kind in self._trained
            self._has_autocast |= is_trained and torch.is_autocast_enabled("cuda")
            steps.forward(is_trained=is_trained)
            try:
                return call(*arguments, **named)
            finally:
                self._here.is_within = False
                steps.forward(is_done=True, is_trained=is_trained)

        self._put(kind, "__call__", MarkedMethod(torch.nn.Module if own is None else kind, "__call__", outermost))

    # Copies

    def _watch_copies(self) -> None:
        """Watches copies to a device, from the first use of one on."""
        if self._sees_copies or not uses_cuda():
            return
        self._sees_copies = True
        for name in ("to", "cuda"):
            self._put(torch.Tensor, name, MarkedMethod(torch.Tensor, name, self._copies(getattr(torch.Tensor, name))))

    def _copies(self, original: Any) -> Callable[..., Any]:
        steps = self._steps

        def copied(tensor: Any, *arguments: Any, **named: Any) -> Any:
            if steps.is_off or self._here.is_within or tensor.is_cuda:
                return original(tensor, *arguments, **named)
            steps.copying(is_done=False)
            found = original(tensor, *arguments, **named)
            if getattr(found, "is_cuda", False):
                steps.copying(is_done=True)
            return found

        return copied


class MarkedMethod:
    """A method that stands for another one: it is equal to it, and is pickled as its name.

    torchvision and others look up methods of tensors in sets and dicts.
    """

    def __init__(self, owner: type, name: str, function: Callable[..., Any]) -> None:
        self._owner, self._name, self._function = owner, name, function
        self._original = getattr(owner, name)
        functools.update_wrapper(self, self._original)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self._function, instance)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Calls the method."""
        return self._function(*arguments, **named)

    def __eq__(self, other: object) -> bool:
        return other is self or other == self._original

    def __hash__(self) -> int:
        return hash(self._original)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)


def outermost_modules() -> list[Any]:
    """Returns the modules with parameters that are part of no other."""
    module_type = torch.nn.Module
    modules = [one for one in gc.get_objects() if issubclass(type(one), module_type) and "_modules" in vars(one)]
    inner = {id(child) for one in modules for child in vars(one)["_modules"].values()}
    return [one for one in modules if id(one) not in inner and next(one.parameters(), None) is not None]


def is_wrapper_of_compiled(module: Any) -> bool:
    """Returns whether a module is, or wraps, what torch.compile returned, and is called outside of compiled code."""
    return any("_orig_mod" in vars(one).get("_modules", {}) for one in (module, *module.children()))


def _is_model(module: Any) -> bool:
    """Returns whether an untrained module may be a model of its own. Single layers of torch are in all models."""
    return not type(module).__module__.startswith("torch.nn.modules") or bool(module._modules)


def _between(mark: Callable[..., None], original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that marks its begin and its end."""

    @functools.wraps(original)
    def marked(*arguments: Any, **named: Any) -> Any:
        mark(is_done=False)
        try:
            return original(*arguments, **named)
        finally:
            mark(is_done=True)

    return marked


def _takes_closure(kind: Any) -> bool:
    """Returns whether the first argument of an optimizer's step is a closure."""
    with suppress(ValueError, TypeError):  # a step without a signature
        return [*inspect.signature(kind.step).parameters][1:2] == ["closure"]
    return False


def _is_compiled(module: Any) -> bool:
    return module._compiled_call_impl is not None or any(
        "_orig_mod" in vars(one)["_modules"] for one in module.modules()
    )


def _has_compiled() -> bool:
    """Returns whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("frames"))


def _sharded_dimensions(parameters: list[Any]) -> int:
    """Returns over how many dimensions of a mesh of ranks DTensors are sharded: FSDP's one, tensor parallelism's."""
    placements = [getattr(one, "placements", ()) for one in parameters]
    return max((sum(not one.is_replicate() for one in each) for each in placements), default=0)


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
