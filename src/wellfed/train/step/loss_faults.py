"""Explains mistakes in a user's ``loss``: wrong return values and errors, with keys, shapes and classes."""

from __future__ import annotations

import ast
import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from wellfed.batches import Delivery, shapes_of
from wellfed.contract import Batch, LossOutput
from wellfed.errors import ModelError, WellfedError, first_line, is_the_users
from wellfed.train.memory import oom

_RETURN = "Return the loss as a tensor of one number, a dict with 'loss', or LossOutput(loss, metrics={...})."
_OWN_FIGURES = {"loss": "the loss", "lr": "the learning rate"}
"""Names that the engine records itself -> what they mean."""
_OUT_OF_RANGE = re.compile(r"Target -?\d+ is out of bounds|Class values must be|index out of range in self")
_NO_SCALAR = "grad can be implicitly created only for scalar outputs"
_UNPACK = re.compile(r"(too many|not enough) values to unpack")


def output_of(given: Any, name: str, *, needs_gradient: bool) -> LossOutput:
    """Converts the return value of ``loss`` to a `LossOutput`.

    Args:
        name: name of the function, for messages.
        needs_gradient: whether a backward pass follows.

    Raises:
        ModelError: the value can't be used as a loss, or a metric beside it is not one number or has a name of the
            engine's own.
    """
    output = given if isinstance(given, LossOutput) else _converted(given, name)
    loss = output.loss
    if not isinstance(loss, Tensor):
        raise ModelError(f"{name} returned {_kind(loss)} as the loss. {_way_out_of(loss)}")
    if loss.dim():
        if loss.numel() != 1:
            raise ModelError(_not_scalar(name, loss))
        output.loss = loss = loss.reshape(())
    if needs_gradient and torch.is_grad_enabled() and not loss.requires_grad:
        if not loss.is_floating_point():
            raise ModelError(f"{name}: the loss is {loss.dtype}, which has no gradient. Return a float tensor.")
        raise ModelError(
            f"{name}: the loss has no gradient. It was computed under torch.no_grad(), from .item(), .detach() or "
            ".data, or by no weight that is trained (requires_grad)."
        )
    metrics: Any = {} if output.metrics is None else output.metrics
    if not isinstance(metrics, Mapping):
        raise ModelError(f"{name}: the metrics are {_kind(metrics)}. Give a dict: metrics={{'accuracy': accuracy}}.")
    output.metrics = {key: _metric(value, key, loss, name) for key, value in metrics.items()}
    return output


def _metric(value: Any, key: str, loss: Tensor, name: str) -> Tensor:
    """Returns a metric as a tensor on the device of the loss."""
    if key in _OWN_FIGURES:
        problem = f"a metric has the name {key}, under which {_OWN_FIGURES[key]} is recorded"
        raise ModelError(f"{name}: {problem}. Leave it out, or rename it, such as own_{key}.")
    is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    if not is_number:
        kind = f"has shape {list(value.shape)}" if isinstance(value, Tensor) else f"is {_kind(value)}"
        raise ModelError(f"{name}: the metric {key} {kind}, and must be one number, such as its mean.")
    if isinstance(value, Tensor) and value.device == loss.device:
        return value
    if isinstance(value, (int, float)):
        return torch.full((), float(value), device=loss.device)  # a fill; a copy would wait for the device
    return torch.as_tensor(value, device=loss.device)


def _converted(given: Any, name: str) -> LossOutput:
    if isinstance(given, Tensor):
        return LossOutput(given)
    if isinstance(given, Mapping):
        if "loss" not in given:
            keys = ", ".join(map(str, given)) or "nothing"
            raise ModelError(f"{name} returned a dict without 'loss'; it has {keys}. {_RETURN}")
        figures = {str(key): value for key, value in given.items() if key != "loss" and _is_scalar(value)}
        return LossOutput(given["loss"], metrics=figures)
    raise ModelError(f"{name} returned {_kind(given)}. {_way_out_of(given)}")


def _is_scalar(value: Any) -> bool:
    """Returns whether a value beside the loss is a metric. A tensor of shape [1] may be the scores of one sample."""
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    return shapes_of(value) if isinstance(value, (tuple, list)) else f"a {type(value).__name__}"


def _way_out_of(value: Any) -> str:
    if value is None:
        return f"Is its return statement missing? {_RETURN}"
    if isinstance(value, (int, float)):
        return f"Leave out .item() and float(): a number has no gradient. {_RETURN}"
    return _RETURN


def explained(error: Exception, name: str, batch: Batch, model: nn.Module) -> ModelError | None:
    """Returns an error that explains one of a user's function.

    An unknown error only gets a note with the shapes of the batch; the result is None.

    Args:
        name: name of the function, for messages.
        model: its modules have the names of layers.
    """
    if oom.classify(error, takes_suspects=True) is not None:
        return None
    try:
        found = _found(error, [frame for frame, _ in traceback.walk_tb(error.__traceback__)], batch, model)
    except Exception:  # noqa: BLE001  the error itself must not be lost
        found = None
    if found is None and batch is None:
        return None
    if found is None:
        error.add_note(f"{name} was given {shapes_of(batch)}.")
        return None
    text, row = found
    explanation = ModelError(f"{name}{_place(error)}: {text}")
    explanation.row = row
    return explanation


Found = tuple[str, int | None] | None
"""Message, and the row of the batch that causes the error."""


def explained_in_hooks(error: Exception, module: nn.Module) -> ModelError | None:
    """Returns an error that explains one in a LightningModule's step; None if it is unknown."""
    if isinstance(error, WellfedError):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if is_the_users(frame.f_code.co_filename)]
    name = f"{type(module).__name__}.{own[0].f_code.co_name if own else 'training_step'}"
    if str(error) == _NO_SCALAR:
        losses = (frame.f_locals.get("tensor", frame.f_locals.get("loss")) for frame in frames)
        loss = next((one for one in losses if isinstance(one, Tensor) and one.numel() != 1), None)
        told = None if loss is None else ModelError(_not_scalar(name, loss))
    else:
        told = explained(error, name, own[0].f_locals.get("batch") if own else None, module)
    if told is not None:
        for note in getattr(error, "__notes__", ()):
            told.add_note(note)
    return told


def _not_scalar(name: str, loss: Tensor) -> str:
    return f"{name}: the loss has shape {list(loss.shape)}, and must be one number. Return loss.mean()."


def add_place(error: ModelError, delivery: Delivery, split: str, offset: int | None) -> None:
    """Adds a note that names the batch, and the sample if it is known.

    Args:
        offset: samples of the batch before the model's input; None = unknown.
    """
    place = f"in batch {delivery.index} of {split}" + (f", epoch {delivery.epoch}" if split == "train" else "")
    if error.row is not None and offset is not None and delivery.indices is not None:
        number = offset + error.row
        if number < len(delivery.indices):
            place += f", sample {int(delivery.indices[number])} of the data set"
    error.add_note(place)


def _found(error: Exception, frames: list[FrameType], batch: Batch, model: nn.Module) -> Found:
    return (
        _of_key(error, frames)
        or _of_target(error, frames)
        or _of_layer(error, frames, model)
        or _of_arguments(error, frames)
        or _of_batch(error, batch)
    )


def _of_key(error: Exception, frames: list[FrameType]) -> Found:
    """Explains a missing key of a mapping, if the failing expression names the mapping."""
    if not isinstance(error, KeyError) or not error.args:
        return None
    own = [place for place in enumerate(traceback.extract_tb(error.__traceback__)) if is_the_users(place[1].filename)]
    if not own:
        return None
    number, summary = own[-1]
    frame = frames[number]
    for owner, node in _subscripts(summary):
        held = frame.f_locals.get(owner)
        key = node.value if isinstance(node, ast.Constant) else frame.f_locals.get(getattr(node, "id", ""))
        if key == error.args[0] and isinstance(held, Mapping) and key not in held:
            return f"{owner} has no key {key!r}. It has {shapes_of(held)}.", None
    return None


def _subscripts(summary: traceback.FrameSummary) -> Iterator[tuple[str, ast.expr]]:
    """Yields (name, key) of each subscript in the expression that failed."""
    line = linecache.getline(summary.filename, summary.lineno or 0)
    text = line.encode()[summary.colno : summary.end_colno].decode(errors="replace")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:  # the expression continues in the next line
        return
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=ast.Name(id=owner), slice=(ast.Constant() | ast.Name()) as key):
                yield owner, key


def _of_target(error: Exception, frames: list[FrameType]) -> Found:
    """Explains a target beyond the classes, or an index beyond the rows of an embedding."""
    if not _OUT_OF_RANGE.search(str(error)):
        return None
    for frame in reversed(frames):
        held, function = frame.f_locals, frame.f_code.co_name
        given, target, table = held.get("input"), held.get("target"), held.get("weight")
        if function == "embedding" and isinstance(given, Tensor) and isinstance(table, Tensor):
            size = table.shape[0]
            row, value = _first_outside(given, size, None)
            text = (
                f"the embedding has {size} rows (0 to {size - 1}), and was asked for row {value} (indices "
                f"{list(given.shape)} from {int(given.min())} to {int(given.max())}; sample {row} of them, from 0). "
                f"Make num_embeddings {int(given.max()) + 1} or more, or mend the indices."
            )
            return (text if given.min() >= 0 else f"{text.partition(' Make')[0]} Mend the indices."), row
        if isinstance(given, Tensor) and isinstance(target, Tensor) and not target.is_floating_point():
            ignored = held.get("ignore_index")
            classes = given.shape[1] if given.dim() > 1 else given.shape[0]
            row, value = _first_outside(target, classes, ignored)
            least, most = int(target[target != ignored].min()), int(target.max())
            text = (
                f"{function}: the target {value} is outside of the {classes} classes (0 to {classes - 1}) of the "
                f"output {list(given.shape)}. Targets of this batch are {least} to {most}; the first that is outside "
                f"is sample {row} of it, from 0. "
            )
            if least < 0:
                way_out = f"Mark what does not count with ignore_index={least}, or mend the labels."
            elif least > 0 and most == classes:
                way_out = "Labels that begin at 1: subtract 1."
            else:
                way_out = f"Give the model {most + 1} outputs, or mend the labels."
            return text + way_out, row
    return None


def _first_outside(values: Tensor, size: int, ignored: int | None) -> tuple[int, int]:
    """Returns row and value of the first value outside of 0 to size - 1."""
    is_outside = (values < 0) | (values >= size)
    if ignored is not None:
        is_outside &= values != ignored
    first = is_outside.nonzero()[0]
    return int(first[0]) if len(first) else 0, int(values[tuple(first)])


_LAST = {"Linear": "in_features", "RNN": "input_size", "LSTM": "input_size", "GRU": "input_size"}
"""Layer that needs a certain last dimension -> the argument that sets it."""
_CHANNELS = {"Conv": "in_channels", "BatchNorm": "num_features", "InstanceNorm": "num_features"}
"""First letters of a layer that needs a certain dimension 1 -> the argument that sets it."""


def _of_layer(error: Exception, frames: list[FrameType], model: nn.Module) -> Found:
    """Explains an input that does not fit a layer of torch."""
    if not isinstance(error, (RuntimeError, ValueError, TypeError)):
        return None
    for frame in reversed(frames):
        layer, given = frame.f_locals.get("self"), frame.f_locals.get("input")
        if not isinstance(layer, nn.Module) or not isinstance(given, Tensor) or any(True for _ in layer.children()):
            continue
        if not type(layer).__module__.startswith("torch.nn."):
            continue
        kind = type(layer).__name__
        called = next((path for path, module in model.named_modules() if module is layer), "")
        text = f"the layer {called or kind} is {layer!r} and was given {shapes_of(given)}"
        weight = next(layer.parameters(), None)
        if weight is not None and weight.dtype != given.dtype and "dtype" in str(error).lower():
            return f"{text}; its weights are {weight.dtype}. Convert the input with .float().", None
        needed = _LAST.get(kind)
        if needed is not None and given.dim() and given.shape[-1] != getattr(layer, needed):
            here, place = int(given.shape[-1]), "last dimension"
        else:
            needed = next((name for prefix, name in _CHANNELS.items() if kind.startswith(prefix)), None)
            if needed is None or given.dim() < 2 or given.shape[1] == getattr(layer, needed):
                return f"{text}: {first_line(error)}.", None
            here, place = int(given.shape[1]), "dimension 1"
        must = getattr(layer, needed)
        return f"{text}. Its {place} must be {must}, and is {here}: set {needed}={here}, or reshape the input.", None
    return None


def _of_arguments(error: Exception, frames: list[FrameType]) -> Found:
    """Explains an input and a target that don't match in a loss of torch."""
    if not isinstance(error, (RuntimeError, ValueError, TypeError)):
        return None
    for frame in reversed(frames):
        given, target = frame.f_locals.get("input"), frame.f_locals.get("target")
        if frame.f_globals.get("__name__") == "torch.nn.functional" and isinstance(target, Tensor):
            both = f"input {shapes_of(given)}, target {shapes_of(target)}"
            return f"{frame.f_code.co_name}({both}): {first_line(error).rstrip('.')}.", None
    return None


def _of_batch(error: Exception, batch: Batch) -> Found:
    """Explains a batch that is used as another type, such as a dict as an object."""
    kind, text = type(batch).__name__, str(error)
    if isinstance(error, AttributeError) and error.obj is batch and error.name:
        way_out = f" Write batch[{error.name!r}]." if isinstance(batch, Mapping) and error.name in batch else ""
        return f"the batch is a {kind} without {error.name}. It has {shapes_of(batch)}.{way_out}", None
    is_indexed = isinstance(error, TypeError) and text.startswith(f"{kind} indices must be integers")
    if isinstance(batch, (tuple, list)) and is_indexed:
        return f"the batch is a {kind} and has no keys. It has {shapes_of(batch)}.", None
    if isinstance(error, ValueError) and _UNPACK.match(text):
        return f"{first_line(error)}. The batch has {shapes_of(batch)}.", None
    return None


def _place(error: Exception) -> str:
    """Returns the last place in the user's code: file, line number and text; empty without one."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_the_users(frame.filename)]
    if not own:
        return ""
    file, here = Path(own[-1].filename), Path.cwd()
    shown = file.relative_to(here) if file.is_relative_to(here) else file
    return f" ({shown}:{own[-1].lineno}: {own[-1].line})"
