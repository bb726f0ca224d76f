import json
from pathlib import Path

import pytest
import torch

from wellfed import DataError, Features
from workloads.recsys.model import TwoTowerRecommender

TEXTS = ["male, writer", "female, farmer of many things", "a film", "another one", "a third film. Crime, Drama", ""]
ALL = torch.arange(len(TEXTS))


def features(**arguments: object) -> tuple[TwoTowerRecommender, Features]:
    model = TwoTowerRecommender(2, 4, TEXTS, dim=4, encoder_dim=16, **arguments)
    return model, model.features()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny GPT-2 and its tokenizer, as save_pretrained leaves them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2Model, PreTrainedTokenizerFast

    folder = tmp_path / "tiny"
    words = ["[UNK]", "male", "female", ",", "writer", "film", "a", "."]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(5)
    config = GPT2Config(vocab_size=8, n_positions=12, n_embd=24, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2Model(config).save_pretrained(folder)
    return folder


def test_frozen_rows_are_the_same_one_by_one_together_and_in_training_mode():
    model, source = features()
    table = source.rows(ALL)
    assert (source.num_rows, source.bytes, source.trainable) == (6, 6 * 16 * 4, False)
    assert (table.shape, table.dtype, table.requires_grad) == ((6, 16), torch.float32, False)
    model.train()
    for index in (4, 0, 5):
        assert torch.allclose(source.rows(torch.tensor([index])), table[index : index + 1], atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.allclose(source.rows(ALL), table, atol=1e-5)
    assert not [name for name, p in model.named_parameters() if "encoder" in name and p.requires_grad]
    assert len({tuple(row.tolist()) for row in table}) == 6


def test_the_mean_goes_over_real_tokens_only():
    model, source = features()
    length = int(model.encoder.lengths[0])
    hidden = model.encoder.gpt2(input_ids=model.encoder.token_ids[:1, :length]).last_hidden_state
    assert torch.allclose(source.rows(torch.tensor([0])), hidden.mean(1), atol=1e-5)


@pytest.mark.parametrize("lora_rank", [0, 2, None])
def test_a_trained_encoder_gets_gradients_in_the_chosen_parameters_only(lora_rank: int | None):
    model, source = features(train_encoder=True, lora_rank=lora_rank)
    assert source.trainable
    source.rows(ALL).square().sum().backward()
    trained = [name for name, p in model.encoder.named_parameters() if p.grad is not None]
    assert trained == [name for name, p in model.encoder.named_parameters() if p.requires_grad]
    assert all("lora" in name for name in trained) == bool(lora_rank)
    assert trained


def test_a_saved_checkpoint_is_loaded_with_its_tokenizer(checkpoint: Path):
    from transformers import GPT2Model

    model, source = features(pretrained=str(checkpoint))
    original = GPT2Model.from_pretrained(checkpoint).eval()
    ids = torch.tensor([[1, 3, 4]])  # male , writer
    assert torch.allclose(source.rows(torch.tensor([0])), original(ids).last_hidden_state.mean(1), atol=1e-5)
    assert model.encoder.dim == 24
    assert not any(p.requires_grad for p in model.encoder.parameters())


def _edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


FAULTS = [
    (lambda f: (f / "config.json").unlink(), "lacks config.json"),
    (lambda f: (f / "tokenizer.json").unlink(), "lacks tokenizer.json"),
    (lambda f: _edit_config(f, model_type="bert"), "model_type='bert', the encoder must be gpt2"),
    (lambda f: (f / "model.safetensors").write_bytes(b"short"), "can't be loaded"),
]


@pytest.mark.parametrize(("damage", "message"), FAULTS)
def test_a_damaged_checkpoint_is_named_with_a_way_out(checkpoint: Path, damage, message: str):
    damage(checkpoint)
    with pytest.raises(DataError) as caught:
        features(pretrained=str(checkpoint))
    assert message in str(caught.value)
    assert f"workload.model.pretrained={checkpoint}" in str(caught.value)
    assert "pretrained=null" in str(caught.value)


def test_a_hub_name_without_network_is_a_readable_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"pretrained=nobody/no-such-gpt2 can't be loaded: .*network"):
        features(pretrained="nobody/no-such-gpt2")
