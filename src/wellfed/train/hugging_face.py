"""Wraps a Hugging Face model as a workload's model, with batches weighted by tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.utils.data import default_collate

from wellfed import batches
from wellfed.contract import Batch, LossOutput
from wellfed.errors import ConfigError, DataError

Weight = Literal["rows", "tokens", "next_tokens"]
_BY_LOSS: Mapping[str | None, Weight] = {
    **dict.fromkeys(("ForCausalLM", "ForConditionalGeneration"), "next_tokens"),
    **dict.fromkeys(("ForMaskedLM", "ForTokenClassification", "ForSemanticSegmentation"), "tokens"),
    **{f"For{kind}Classification": "rows" for kind in ("Sequence", "Image", "Video", "Audio")},
    "ForQuestionAnswering": "rows",
}
"""Entries that the loss is a mean over, by ``PreTrainedModel.loss_type``."""
_LABELS = ("label", "label_ids")
"""Columns that transformers' collators rename to ``labels``."""
IGNORED = -100
"""Label of entries without a target, everywhere in transformers except segmentation."""


def from_transformers(model: nn.Module, *, weight: Weight | None = None) -> TransformersModel:
    """Returns a model whose ``loss(batch)`` passes the batch's entries to ``model`` and returns its loss.

    Columns that the model's ``forward`` does not name are dropped, as the Trainer of transformers does by default.

    Args:
        model: a model of transformers, also with adapters of peft.
        weight: entries that the loss is a mean over: rows, tokens with a label, or these without the first of each row.
            None = the usual weight of its class.

    Raises:
        ConfigError: an argument is wrong, or the usual weight is unknown.
    """
    if weight is not None and weight not in get_args(Weight):
        way_out = f"Write one of {', '.join(get_args(Weight))}, or null."
        raise ConfigError.of(f"workload.model.weight={weight}", "is nothing that a loss can be a mean over.", way_out)
    if isinstance(model, str):
        way_out = f"Make it in a function that workload.model names: transformers.{model}.from_pretrained(folder)."
        raise ConfigError.of(f"workload.model.model={model}", "is the name of a model, not a model.", way_out)
    return TransformersModel(model, weight)


class TransformersModel(nn.Module):
    """A model of transformers or peft, with ``loss`` and ``loss_weight``."""

    def __init__(self, model: nn.Module, weight: Weight | None = None) -> None:
        super().__init__()
        self.model = model
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        self._columns = frozenset((*inspect.signature(base.forward).parameters, *_LABELS))
        self._weight: Weight = weight or _weight_of(base)
        is_segmentation = getattr(base, "loss_type", None) == "ForSemanticSegmentation"
        self._ignored: int = getattr(base.config, "semantic_loss_ignore_index", 255) if is_segmentation else IGNORED

    def forward(self, batch: Batch) -> Any:
        """Returns the model's output for a batch, a mapping of its arguments."""
        return self.model(**{key: value for key, value in batch.items() if key in self._columns})

    def collating(self, collate: Callable[[list[Any]], Batch] | None) -> Callable[[list[Any]], Batch]:
        """Returns a collator that drops columns that the model does not take."""
        return partial(_collated, self._columns, collate or default_collate)

    def loss(self, batch: Batch) -> LossOutput:
        """Returns the model's loss, with logits and labels for metrics if each logit has a label."""
        output = self(batch)
        if getattr(output, "loss", None) is None:
            problem = f"{type(self.model).__name__} gives no loss for a batch of {', '.join(batch)}."
            way_out = "Add labels to the samples, or let the collator make them (DataCollatorForLanguageModeling)."
            raise DataError(f"{problem} {way_out}")
        predictions, targets = getattr(output, "logits", None), batch.get("labels")
        if self._weight == "next_tokens" and isinstance(predictions, Tensor) and targets is not None:
            predictions, targets = predictions[:, :-1], targets[:, 1:]
        return LossOutput(output.loss, predictions=predictions, targets=targets)

    def loss_weight(self, batch: Batch) -> int:
        """Returns the number of rows or tokens that the loss of a batch is a mean over."""
        labels = batch.get("labels")
        if self._weight == "rows" or labels is None:
            return batches.batch_size(batch)
        counted = labels[:, 1:] if self._weight == "next_tokens" else labels
        return int((counted != self._ignored).sum())


def _collated(columns: frozenset[str], collate: Callable[[list[Any]], Batch], samples: list[Any]) -> Batch:
    """Returns the batch of some columns of the samples."""
    if samples and isinstance(samples[0], Mapping):
        samples = [{key: value for key, value in one.items() if key in columns} for one in samples]
    return collate(samples)


def _weight_of(model: Any) -> Weight:
    name, kind = type(model).__name__, getattr(model, "loss_type", None)
    if kind is None and "LMHead" in name:
        kind = model.loss_type = "ForCausalLM"  # the type that transformers assumes, with a warning
    weight = _BY_LOSS.get(kind)
    if weight is None:
        problem = f"is null, and what the loss of {name} is a mean over is not known."
        raise ConfigError.of("workload.model.weight", problem, f"Set one of {', '.join(get_args(Weight))}.")
    # An encoder-decoder shifts its inputs, not its labels.
    is_whole = weight == "next_tokens" and getattr(model.config, "is_encoder_decoder", False)
    return "tokens" if is_whole else weight
