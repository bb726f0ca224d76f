"""A model of transformers learns the same however its batches are split, weighed by tokens."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kit.few import slow
from wellfed.batches import Delivery, to_device
from wellfed.errors import ConfigError, DataError
from wellfed.train.hugging_face import TransformersModel, from_transformers
from wellfed.train.memory.step_down import Fallbacks, MicroBatches
from wellfed.train.step.loss import Loss
from wellfed.train.step.micro_batches import Preparation
from wellfed.train.step.precision import Precision
from wellfed.train.step.step_passes import Computation
from wellfed.train.step.train_step import TrainStep

VOCABULARY, ROWS, LENGTH = 31, 6, 9
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": LENGTH}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}


def of_transformers(name: str) -> Any:
    """Returns a class; transformers is imported by the first test that needs it, not by each test process."""
    import transformers

    return getattr(transformers, name)


def gpt2() -> Any:
    return of_transformers("GPT2LMHeadModel")(of_transformers("GPT2Config")(**GPT2))


def gpt2_with_lora() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


def masked() -> Any:
    return of_transformers("BertForMaskedLM")(of_transformers("BertConfig")(**BERT))


def token_classes() -> Any:
    return of_transformers("BertForTokenClassification")(of_transformers("BertConfig")(**BERT, num_labels=4))


def classes() -> Any:
    return of_transformers("BertForSequenceClassification")(of_transformers("BertConfig")(**BERT, num_labels=3))


def translation() -> Any:
    return of_transformers("T5ForConditionalGeneration")(of_transformers("T5Config")(**T5))


def batch(model: Any, *, is_empty: bool = False) -> Any:
    """Returns padded rows of 2 to 9 tokens; with ``is_empty`` one has no label."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, VOCABULARY, (ROWS, LENGTH), generator=generator)
    lengths = torch.tensor([9, 2, 5, 3, 9, 4])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    labels = torch.where(mask.bool(), ids, -100)
    if isinstance(model, of_transformers("BertForSequenceClassification")):
        labels = ids[:, 0] % 3
    elif isinstance(model, of_transformers("BertForTokenClassification")):
        labels = torch.where(mask.bool(), ids % 4, -100)
    if is_empty:
        labels[1] = -100
    return of_transformers("BatchEncoding")({"input_ids": ids, "attention_mask": mask, "labels": labels})


def gradients(made: TransformersModel, whole: Any, micro: int) -> tuple[Tensor, Tensor]:
    """Returns the gradients of one step in micro-batches, with its loss."""
    kept: list[Tensor] = []

    class Keeps(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            kept.extend(each.grad.flatten().clone() for each in made.parameters() if each.grad is not None)

    device = torch.device("cpu")
    step_loss, precision = Loss(made), Precision("32-true", "cpu", None)
    step = TrainStep(
        Computation(made, step_loss, Preparation(None, 0, made), precision, device),
        Keeps([each for each in made.parameters() if each.requires_grad], lr=0.1),
        Fallbacks(MicroBatches(micro)),
    )
    loss = step(Delivery(to_device(whole, device), 0, 0, ROWS))
    return torch.cat(kept), loss


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it by its old name
@pytest.mark.parametrize("make", [gpt2, classes, *map(slow, (gpt2_with_lora, masked, token_classes, translation))])
def test_split_batches_give_the_same_gradients(make: Any) -> None:
    torch.manual_seed(2)
    model = make()
    made, whole = from_transformers(model), batch(model)
    expected = model(**whole).loss
    together, loss = gradients(made, whole, ROWS)
    assert torch.allclose(loss, expected)
    for micro in (1, 4):
        apart, same_loss = gradients(made, whole, micro)
        assert torch.allclose(apart, together, atol=1e-5, rtol=0)
        assert torch.allclose(same_loss, loss, atol=1e-5)
    assert together.abs().max() > 1e-3


def test_a_row_without_a_label_counts_nothing() -> None:
    torch.manual_seed(2)
    model = gpt2()
    made, whole = from_transformers(model), batch(model, is_empty=True)
    together, _ = gradients(made, whole, ROWS)
    assert torch.allclose(gradients(made, whole, 1)[0], together, atol=1e-5, rtol=0)


def test_logits_and_labels_are_there_for_metrics() -> None:
    from torchmetrics.text import Perplexity

    model = gpt2()
    made, whole = from_transformers(model), batch(model)
    output = made.loss(whole)
    perplexity = Perplexity(ignore_index=-100)
    perplexity.update(output.predictions, output.targets)
    assert perplexity.compute() == pytest.approx(float(output.loss.detach().exp()), rel=1e-4)
    assert output.predictions.shape[:2] == output.targets.shape == (ROWS, LENGTH - 1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "GPT2LMHeadModel"}, "model=GPT2LMHeadModel.*not a model.*GPT2LMHeadModel.from_pretrained"),
        ({"model": gpt2, "weight": "words"}, "weight=words.*rows, tokens, next_tokens"),
    ],
)
def test_wrong_arguments_are_faults(given: dict[str, Any], words: str) -> None:
    made = {name: value() if callable(value) else value for name, value in given.items()}
    with pytest.raises(ConfigError, match=words):
        from_transformers(**made)


def test_a_batch_without_labels_is_a_fault() -> None:
    made = from_transformers(gpt2())
    with pytest.raises(DataError, match="no loss for a batch of input_ids, attention_mask. Add labels"):
        made.loss({name: value for name, value in batch(made.model).items() if name != "labels"})


def test_a_loss_that_is_not_known_is_asked_for() -> None:
    model = of_transformers("BertForPreTraining")(of_transformers("BertConfig")(**BERT))
    with pytest.raises(ConfigError, match="loss of BertForPreTraining is a mean over is not known. Set one of rows"):
        from_transformers(model)
    assert from_transformers(model, weight="rows").loss_weight(batch(model)) == ROWS
    assert from_transformers(model, weight="tokens").loss_weight(batch(model)) == 32


def samples(model: Any) -> tuple[list[dict[str, Any]], Any]:
    """Returns rows of a tokenized data set with columns that no model takes, and the collator that pads them."""
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[PAD]": 0, "a": 1}, unk_token="[PAD]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    rows = [
        {"text": "a " * n, "idx": n, "label": n % 3, "input_ids": [4] * n, "attention_mask": [1] * n} for n in (2, 5)
    ]
    return rows, DataCollatorWithPadding(tokenizer)


def test_columns_that_the_model_does_not_take_are_dropped_before_the_collator() -> None:
    made = from_transformers(classes())
    rows, collate = samples(made)
    with pytest.raises(ValueError, match="text"):
        collate(rows)
    kept: Any = pickle.loads(pickle.dumps(made.collating(collate)))
    padded = kept(rows)
    assert set(padded) == {"input_ids", "attention_mask", "labels"}
    assert padded["input_ids"].shape == (2, 5)
    assert made.loss(padded).loss.shape == ()


def test_a_batch_with_more_than_the_model_takes_is_trained_on() -> None:
    model = classes()
    whole = batch(model)
    more = {**whole, "text": ["a"] * ROWS, "idx": torch.arange(ROWS)}
    assert torch.equal(from_transformers(model).loss(more).loss, from_transformers(model).loss(whole).loss)
