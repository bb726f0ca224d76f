"""Seeds, saves and restores all random generators that a model may draw from."""

from __future__ import annotations

import inspect
import os
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import islice
from types import BuiltinMethodType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, get_args

import numpy as np
import torch

from wellfed.errors import is_the_users
from wellfed.sample_rng import SampleRng, seed_from


def seed_everything(seed: int) -> None:
    """Seeds Python, numpy and torch in this process, and in its children through Lightning's environment variables."""
    seed %= 2**32
    os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"] = str(seed), "0"
    seed_all(seed)


def seed_all(seed: int) -> None:
    """Seeds Python, numpy and torch (CPU and GPUs) in this process only."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def state(device: torch.device | None = None) -> dict[str, Any]:
    """Returns the states of torch, numpy and Python, as values that a weights-only load accepts.

    Does not synchronize with the device.

    Args:
        device: the only GPU whose state is saved; None = all GPUs, if CUDA is in use.
    """
    name, keys, place, has_gauss, gauss = np.random.get_state()
    version, numbers, gauss_next = random.getstate()
    cuda: list[torch.Tensor] = []
    if torch.cuda.is_initialized() and (device is None or device.type == "cuda"):  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state_all() if device is None else [torch.cuda.get_rng_state(device)]
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(place), int(has_gauss), gauss],
        "python": [version, list(numbers), gauss_next],
    }


def restore(saved: dict[str, Any], device: torch.device | None = None) -> None:
    """Restores the result of `state`: the state of ``device``, None = those of all GPUs."""
    torch.set_rng_state(saved["torch"].cpu())
    cuda = [each.cpu() for each in saved["cuda"]]
    if cuda and torch.cuda.is_available():
        if device is None:
            torch.cuda.set_rng_state_all(cuda)
        elif device.type == "cuda":
            torch.cuda.set_rng_state(cuda[0], device)
    name, keys, place, has_gauss, gauss = saved["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), place, has_gauss, gauss))
    version, numbers, gauss_next = saved["python"]
    random.setstate((version, tuple(numbers), gauss_next))


def numbers(held: Sequence[_Generator] = ()) -> tuple[Any, ...]:
    """Returns values that change when Python's, numpy's or torch's CPU generator, or one of ``held``, is drawn from."""
    return tuple(map(_number_of, (*_of_process(), *held)))


def _number_of(generator: Any) -> Any:
    state = state_of(generator)
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    return state if hasattr(generator, "getstate") else pickle.dumps(state)


def state_of(generator: Any) -> Any:
    """Returns the state of a generator of Python, numpy or torch, for `set_state`."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Restores the result of `state_of`."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state.cpu() if isinstance(generator, torch.Generator) else state)


@contextmanager
def kept(holder: Any = None) -> Iterator[None]:
    """Restores Python's, numpy's and torch's CPU generators afterwards, and the generators in ``holder``."""
    go_back = way_back(holder)
    try:
        yield
    finally:
        go_back()


def way_back(holder: Any = None) -> Callable[[], None]:
    """Returns a function that restores Python's, numpy's and torch's CPU generators as they are now, and the
    generators in ``holder``."""
    states = [(each, state_of(each)) for each in (*_of_process(), *held_by(holder))]

    def go_back() -> None:
        for each, before in states:
            set_state(each, before)

    return go_back


def _of_process() -> tuple[Any, ...]:
    return random, np.random, torch.default_generator


_Generator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
_MOST_OBJECTS = 5_000
"""Maximum number of objects visited, which takes 10 to 20 ms."""
_MOST_ENTRIES, _FEW_ENTRIES = 100, 4
"""Entries up to which a container is visited whole, and visited entries of a larger one, which holds data."""
_SIMPLE = (type(None), str, bytes, int, float, complex)
_WITHOUT_PARTS = (*_SIMPLE, torch.Tensor, np.ndarray, ModuleType, *get_args(_Generator))


def held_by(holder: Any) -> list[_Generator]:
    """Returns the generators that can be reached from an object, but those of GPUs and of the engine."""
    found = {id(each): each for each in reached_from(holder) if isinstance(each, _Generator)}
    return [each for each in found.values() if not _cannot_be_seeded(each)]


def _cannot_be_seeded(generator: _Generator) -> bool:
    is_on_gpu = isinstance(generator, torch.Generator) and generator.device.type != "cpu"
    return is_on_gpu or isinstance(generator, (random.SystemRandom, SampleRng))


def values_in(*holders: Any) -> list[Any]:
    """Returns values that differ once attributes of objects, or of what they hold, change.

    Changes within an array, or beyond the first entries of a container, are not seen.
    """
    found: list[Any] = []
    for each in reached_from(*holders):
        if isinstance(each, _SIMPLE):
            found.append(each)
        else:
            size = len(each) if isinstance(each, (list, dict, set, tuple)) else 0
            version = each._version if isinstance(each, torch.Tensor) and not each.is_inference() else 0
            found += id(each), size, version
    return found


def reached_from(*holders: Any) -> Iterator[Any]:
    """Yields objects and everything that they hold, the nearest first.

    An object holds its attributes and those of its class. A list, tuple, set or dict holds its entries. A function
    holds what it closes over, the globals that it names, and what it names of modules. Of classes, functions and
    modules only those of users count.
    """
    seen: set[int] = set()
    waiting, count = deque(holders), 0
    while waiting and count < _MOST_OBJECTS:
        each = waiting.popleft()
        count += 1
        yield each
        if not isinstance(each, _WITHOUT_PARTS) and id(each) not in seen:
            seen.add(id(each))
            waiting.extend(_parts(each))


def _parts(each: Any) -> Iterable[Any]:
    if isinstance(each, (dict, list, tuple, set, frozenset)):
        entries = each.values() if isinstance(each, dict) else each
        return islice(entries, _MOST_ENTRIES if len(each) <= _MOST_ENTRIES else _FEW_ENTRIES)
    if isinstance(each, partial):
        return each.func, *each.args, *each.keywords.values()
    if isinstance(each, (MethodType, BuiltinMethodType, staticmethod, classmethod)):
        return getattr(each, "__func__", None), getattr(each, "__self__", None)
    if isinstance(each, (FunctionType, type)):
        return _parts_of_code(each)
    attributes = getattr(each, "__dict__", None)
    with_slots = [vars(cls).items() for cls in type(each).__mro__ if "__slots__" in vars(cls)]
    slots = [name for items in with_slots for name, kind in items if isinstance(kind, MemberDescriptorType)]
    values = attributes.values() if isinstance(attributes, dict) else ()
    return *values, *(getattr(each, name, None) for name in slots), type(each)


_is_the_users = cache(is_the_users)


def _parts_of_code(each: FunctionType | type) -> Iterable[Any]:
    file = getattr(sys.modules.get(each.__module__), "__file__", None)
    if file is None or not _is_the_users(file):
        return ()
    if isinstance(each, type):
        return *vars(each).values(), *each.__bases__
    with suppress(ValueError):  # a variable of an enclosing function that has no value yet
        named = inspect.getclosurevars(each)
        return *named.nonlocals.values(), *_with_named(named.globals.values(), each.__code__.co_names)
    return ()


def _with_named(values: Iterable[Any], names: Sequence[str], depth: int = 3) -> Iterator[Any]:
    """Yields values, and of the user's modules among them what has one of the names, as in ``module.part``."""
    for each in values:
        yield each
        if depth and isinstance(each, ModuleType) and _is_the_users(getattr(each, "__file__", None) or "<"):
            yield from _with_named([vars(each)[name] for name in names if name in vars(each)], names, depth - 1)


def seed_for_sample(seed: int, held: Iterable[_Generator] = ()) -> None:
    """Seeds Python, numpy and torch's CPU generator for one sample, and each of ``held`` differently."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # torch.manual_seed would also seed the GPUs, and dropout there would repeat with each sample.
    torch.default_generator.manual_seed(seed)
    seed_held(held, seed)


def seed_held(held: Iterable[_Generator], seed: int) -> None:
    """Seeds generators that an object holds, each differently; takes 3 to 10 us for one."""
    for number, generator in enumerate(held):
        own = seed_from(seed, number)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif not isinstance(generator, np.random.Generator):
            generator.seed(own % 2**32)
        elif type(bits := generator.bit_generator) is np.random.PCG64:
            # numpy's own way from a seed to a state takes six times as long
            state: Any = {"state": own * _PCG64_MULTIPLIER % 2**128, "inc": 2 * own + 1}
            bits.state = {"bit_generator": "PCG64", "state": state, "has_uint32": 0, "uinteger": 0}
        else:
            bits.state = type(bits)(own).state


_PCG64_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645
"""Multiplier of PCG64, which spreads a seed over its 128 bits."""
