"""Encodes text with GPT-2: a small one created here, or a pretrained one from a folder or the hub.

Shapes: R texts, n requested rows, T tokens, E width of the encoder. transformers takes about two seconds to import, so
it is imported only to build an encoder.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellfed import DataError
from workloads.recsys.text import NUM_SPECIAL, PAD, UNKNOWN, build_vocabulary, pad_rows, words

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
"""No dropout, so that a row of the table is always the same."""


@dataclass(frozen=True)
class GPT2Shape:
    """Size of the small encoder."""

    layers: int
    heads: int
    dim: int


class TextEncoder(nn.Module):
    """An encoder that returns the mean of GPT-2's last hidden states over the real tokens of a text.

    The token ids of all texts are buffers, so they move with the model. They are not in checkpoints, since the data
    provide them.
    """

    token_ids: Tensor
    """Token ids, int32 [R, T]."""
    lengths: Tensor
    """Number of real tokens of each text, int32 [R]."""

    def __init__(self, gpt2: nn.Module, ids_RT: Tensor, lengths_R: Tensor, *, dim: int, trainable: bool) -> None:
        super().__init__()
        self.gpt2 = gpt2
        self.trainable = trainable
        self.dim = dim
        self.register_buffer("token_ids", ids_RT, persistent=False)
        self.register_buffer("lengths", lengths_R, persistent=False)
        if not trainable:
            gpt2.requires_grad_(False).eval()

    @property
    def num_rows(self) -> int:
        """Number of texts in the table."""
        return self.token_ids.shape[0]

    def rows(self, indices: Tensor) -> Tensor:
        """Returns float32 ``[n, E]``, with gradients only if the encoder is trained.

        A frozen encoder runs in float32 under autocast too, so that a row computed per batch equals the cached one.
        """
        if self.trainable:
            return self._encode(indices)
        device_type = self.token_ids.device.type
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            return self._encode(indices)

    def _encode(self, indices: Tensor) -> Tensor:
        indices = indices.to(self.token_ids.device)
        ids_nT = self.token_ids.index_select(0, indices)
        lengths_n1 = self.lengths.index_select(0, indices).unsqueeze(1)
        real_nT = torch.arange(ids_nT.shape[1], device=ids_nT.device) < lengths_n1
        # No attention mask, since GPT-2 only looks left and the padding is on the right.
        hidden_nTE = self.gpt2(input_ids=ids_nT, use_cache=False).last_hidden_state
        summed_nE = (hidden_nTE.float() * real_nT.unsqueeze(2)).sum(1)
        mean_nE: Tensor = summed_nE / lengths_n1
        return mean_nE


def small_encoder(
    texts: Sequence[str], max_tokens: int, shape: GPT2Shape, *, train: bool, lora_rank: int
) -> TextEncoder:
    """Returns a GPT-2 of random weights over the words of ``texts``.

    Its weights have a fixed seed, so that they are the same projection of the text in all runs.
    """
    from transformers.models.gpt2.configuration_gpt2 import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Model

    vocabulary = build_vocabulary(texts)
    rows = [[vocabulary.get(word, UNKNOWN) for word in words(text)] for text in texts]
    ids_RT, lengths_R = pad_rows(rows, max_tokens, PAD)
    config = GPT2Config(
        vocab_size=len(vocabulary) + NUM_SPECIAL,
        n_positions=max_tokens,
        n_embd=shape.dim,
        n_layer=shape.layers,
        n_head=shape.heads,
        bos_token_id=PAD,
        eos_token_id=PAD,
        **NO_DROPOUT,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        gpt2 = GPT2Model(config)
    return TextEncoder(_adapt(gpt2, train, lora_rank), ids_RT, lengths_R, dim=shape.dim, trainable=train)


def pretrained_encoder(
    texts: Sequence[str], max_tokens: int, pretrained: str, *, train: bool, lora_rank: int
) -> TextEncoder:
    """Returns a GPT-2 and its tokenizer, from a folder or by hub name.

    Raises:
        DataError: the folder or hub name is unknown, files are missing or damaged, it is no GPT-2, or there is no
            network.
    """
    folder = Path(pretrained).expanduser()
    is_local = folder.exists() or pretrained.startswith((".", "/", "~"))
    if is_local:
        _check_folder(folder, pretrained)
    tokenizer, gpt2 = _load(str(folder) if is_local else pretrained, pretrained)
    limit = min(max_tokens, int(gpt2.config.n_positions))
    rows = tokenizer(list(texts), add_special_tokens=False, truncation=True, max_length=limit)["input_ids"]
    biggest = max((max(row) for row in rows if row), default=0)
    if biggest >= gpt2.config.vocab_size:
        problem = f"the tokenizer gives id {biggest}, the model knows {gpt2.config.vocab_size} tokens"
        raise DataError(f"workload.model.pretrained={pretrained}: {problem}. Save model and tokenizer of one training.")
    pad_id = gpt2.config.eos_token_id
    ids_RT, lengths_R = pad_rows(rows, limit, pad_id if isinstance(pad_id, int) and pad_id >= 0 else 0)
    return TextEncoder(_adapt(gpt2, train, lora_rank), ids_RT, lengths_R, dim=gpt2.config.n_embd, trainable=train)


def _check_folder(folder: Path, pretrained: str) -> None:
    """Raises an error that names missing files, before transformers reads the folder."""
    name = f"workload.model.pretrained={pretrained}"
    way_out = (
        "Name a folder written by save_pretrained (model and tokenizer), or pretrained=null for the small encoder."
    )
    if not folder.is_dir():
        raise DataError(f"{name}: {'not a folder' if folder.exists() else 'no such folder'}. {way_out}")
    weights = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
    missing = [file for file in ("config.json",) if not (folder / file).is_file()]
    if not any((folder / file).is_file() for file in weights):
        missing.append("model.safetensors")
    if not (folder / "tokenizer.json").is_file() and not (folder / "vocab.json").is_file():
        missing.append("tokenizer.json")
    if missing:
        raise DataError(f"{name}: the folder lacks {', '.join(missing)}. {way_out}")
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError, OSError) as error:
        raise DataError(f"{name}: config.json can't be read ({error}). {way_out}") from error
    if kind != "gpt2":
        raise DataError(f"{name}: config.json says model_type={kind!r}, the encoder must be gpt2. {way_out}")


def _load(source: str, pretrained: str) -> tuple[Any, Any]:
    """Returns tokenizer and model; turns every failure of transformers into one readable error."""
    from safetensors import SafetensorError
    from transformers.models.auto.tokenization_auto import AutoTokenizer
    from transformers.models.gpt2.modeling_gpt2 import GPT2Model

    try:
        return (
            AutoTokenizer.from_pretrained(source),
            GPT2Model.from_pretrained(source, dtype=torch.float32, **NO_DROPOUT),
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"workload.model.pretrained={pretrained} can't be loaded: {first} "
            "Check the name and the network, or download it elsewhere and name its folder, "
            "or workload.model.pretrained=null for the small encoder."
        ) from error


def _adapt(gpt2: nn.Module, train: bool, lora_rank: int) -> nn.Module:
    if not train or lora_rank == 0:
        return gpt2
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules=["c_attn"], fan_in_fan_out=True)
    with warnings.catch_warnings():
        # peft 0.21 reads a property that transformers 5.23 has renamed
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        adapted: nn.Module = get_peft_model(gpt2, config)
    return adapted
