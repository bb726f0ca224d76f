"""Scores users and items with two towers over ids and text; a dot product ranks all items in one matmul.

Shapes: B samples, U users, I items, D width of the towers, E width of the text rows. Loss: Rendle et al., BPR: Bayesian
Personalized Ranking from Implicit Feedback, UAI 2009, https://arxiv.org/abs/1205.2618
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.linalg import vecdot
from torch.nn.functional import gelu, softplus

from wellfed import ConfigError, Features, LossOutput
from workloads.recsys.encoder import GPT2Shape, TextEncoder, pretrained_encoder, small_encoder

TripletBatch = dict[str, Tensor]
"""Rows ``user``, ``pos``, ``neg`` [B]; with text also ``user_text``, ``pos_text``, ``neg_text``: float [B, E]."""


USUAL_L2 = {"gpt2": 0.005, "none": 0.0025}
"""Weight of the regularisation by ``text``; larger for users with few interactions."""


def text_of(texts: Sequence[str]) -> Literal["gpt2", "none"]:
    """Returns the model's ``text`` for these sentences of users and items."""
    return "gpt2" if any(texts) else "none"


class TwoTowerRecommender(nn.Module):
    """Two towers: score = user vector . item vector + item bias; vector = id embedding + MLP of the text row.

    Args:
        texts: sentences of the U users, then of the I items; unused with ``text="none"``.
        dim: D, width of both towers.
        text: ``none`` = matrix factorisation; None = ``gpt2`` if there are sentences.
        pretrained: folder or hub name of a GPT-2; None = a small random one over the words of ``texts``.
        train_encoder: whether the encoder gets gradients; text rows then can't be cached.
        lora_rank: rank of LoRA matrices of a trained encoder; 0 or None = train all weights.
        encoder_layers: layers of the small encoder; it also has ``encoder_heads`` and ``encoder_dim``.
        max_tokens: maximum length of a text; the rest is cut off.
        mlp_hidden: width of the hidden layer between text row and tower.
        dropout: share of the hidden layer dropped in training.
        init_std: spread of new id embeddings.
        l2: weight of the squared length of the three vectors of a triplet, as in BPR; None = by ``USUAL_L2``.
    """

    def __init__(
        self,
        num_users: int,
        num_items: int,
        texts: Sequence[str] = (),
        *,
        dim: int = 64,
        text: Literal["gpt2", "none"] | None = None,
        pretrained: str | None = None,
        train_encoder: bool = False,
        lora_rank: int | None = 8,
        encoder_layers: int = 2,
        encoder_heads: int = 4,
        encoder_dim: int = 64,
        max_tokens: int = 32,
        mlp_hidden: int = 64,
        dropout: float = 0.0,
        init_std: float = 0.05,
        l2: float | None = None,
    ) -> None:
        super().__init__()
        text = text_of(texts) if text is None else text
        sizes = {"dim": dim, "encoder_layers": encoder_layers, "encoder_heads": encoder_heads}
        sizes |= {"encoder_dim": encoder_dim, "max_tokens": max_tokens, "mlp_hidden": mlp_hidden}
        is_multiple = encoder_heads < 1 or encoder_dim % encoder_heads == 0
        ConfigError.check(
            "workload.model",
            ("text", text, text in ("gpt2", "none"), "is neither gpt2 nor none", "text=gpt2 or text=none"),
            (
                *("train_encoder", train_encoder, text != "none" or not train_encoder),
                *("needs an encoder, and text=none has none", "text=gpt2 or train_encoder=false"),
            ),
            (
                *("pretrained", pretrained, text != "none" or pretrained is None),
                *("needs an encoder, and text=none has none", "text=gpt2 or pretrained=null"),
            ),
            *((name, size, size >= 1, "is below 1", f"{name}=8 or so") for name, size in sizes.items()),
            ("lora_rank", lora_rank, (lora_rank or 0) >= 0, "is below 0", "lora_rank=8 or so"),
            (
                *("encoder_dim", encoder_dim, is_multiple),
                *(f"is no multiple of encoder_heads={encoder_heads}", "a multiple of it"),
            ),
        )
        self.num_users, self.num_items = num_users, num_items
        self.l2 = USUAL_L2[text] if l2 is None else l2
        self.user_embedding = nn.Embedding(num_users, dim)
        self.item_embedding = nn.Embedding(num_items, dim)
        self.item_bias = nn.Embedding(num_items, 1)
        nn.init.normal_(self.user_embedding.weight, std=init_std)
        nn.init.normal_(self.item_embedding.weight, std=init_std)
        nn.init.zeros_(self.item_bias.weight)
        self.encoder: TextEncoder | None = None
        if text == "gpt2":
            rank = lora_rank or 0
            if pretrained is None:
                shape = GPT2Shape(encoder_layers, encoder_heads, encoder_dim)
                self.encoder = small_encoder(texts, max_tokens, shape, train=train_encoder, lora_rank=rank)
            else:
                self.encoder = pretrained_encoder(texts, max_tokens, pretrained, train=train_encoder, lora_rank=rank)
            self.user_mlp = TextMlp(self.encoder.dim, mlp_hidden, dim, dropout)
            self.item_mlp = TextMlp(self.encoder.dim, mlp_hidden, dim, dropout)

    def train(self, mode: bool = True) -> TwoTowerRecommender:
        """Sets the mode like `nn.Module.train`; a frozen encoder stays in evaluation mode."""
        super().train(mode)
        if self.encoder is not None and not self.encoder.trainable:
            self.encoder.eval()
        return self

    def features(self) -> Features | None:
        """Returns the text rows: users at 0..U-1, items at U..U+I-1; None without text."""
        if self.encoder is None:
            return None
        return Features(
            num_rows=self.encoder.num_rows,
            bytes=self.encoder.num_rows * self.encoder.dim * 4,
            rows=self.encoder.rows,
            trainable=self.encoder.trainable,
        )

    def user_vectors(self, user_B: Tensor, text_BE: Tensor | None = None) -> Tensor:
        """Returns user vectors [B, D]."""
        vector_BD = rows_of(self.user_embedding, user_B)
        return vector_BD if self._lacks_text(text_BE) else vector_BD + self.user_mlp(text_BE)

    def item_vectors(self, item_B: Tensor, text_BE: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns item vectors [B, D] and biases [B]."""
        vector_BD = rows_of(self.item_embedding, item_B)
        if not self._lacks_text(text_BE):
            vector_BD = vector_BD + self.item_mlp(text_BE)
        return vector_BD, rows_of(self.item_bias, item_B).squeeze(1)

    def forward(self, batch: TripletBatch) -> tuple[Tensor, Tensor]:
        """Returns the scores of the positive and of the negative items, [B] each."""
        user_BD, (pos_BD, pos_bias_B), (neg_BD, neg_bias_B) = self._vectors(batch)
        return dot(user_BD, pos_BD) + pos_bias_B, dot(user_BD, neg_BD) + neg_bias_B

    def loss(self, batch: TripletBatch) -> LossOutput:
        """Returns the BPR loss, which is low if positive items score above negative ones; ``auc`` is the share that
        does."""
        user_BD, (pos_BD, pos_bias_B), (neg_BD, neg_bias_B) = self._vectors(batch)
        margin_B = dot(user_BD, pos_BD - neg_BD) + (pos_bias_B - neg_bias_B).float()
        squares_B = dot(user_BD, user_BD) + dot(pos_BD, pos_BD) + dot(neg_BD, neg_BD)
        loss = (softplus(-margin_B) + self.l2 * squares_B).mean()
        return LossOutput(loss, {"auc": (margin_B.detach() > 0).float().mean()}, num_samples=len(margin_B))

    def _lacks_text(self, text_BE: Tensor | None) -> bool:
        """Returns whether the model has no text; raises an error for missing or superfluous text rows."""
        if (text_BE is None) != (self.encoder is None):
            wrong = "missing" if text_BE is None else "given to a model without text"
            raise ValueError(f"text rows {wrong}; they come from on_device(batch, rng, features)")
        return text_BE is None

    def _vectors(self, batch: TripletBatch) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Returns the user's vectors [B, D], and those of both items with their biases [B]."""
        return (
            self.user_vectors(batch["user"], batch.get("user_text")),
            self.item_vectors(batch["pos"], batch.get("pos_text")),
            self.item_vectors(batch["neg"], batch.get("neg_text")),
        )


def dot(x_BD: Tensor, y_BD: Tensor) -> Tensor:
    """Returns dot products [B] in float32, under autocast too; their gradient is cheaper than that of a product and a
    sum."""
    with torch.autocast(x_BD.device.type, enabled=False):
        products_B: Tensor = vecdot(x_BD.float(), y_BD.float())
    return products_B


def rows_of(embedding: nn.Embedding, index_B: Tensor) -> Tensor:
    """Returns rows [B, D] of an embedding; its gradient takes a quarter of the time of `nn.Embedding` on a CPU.

    On a GPU that gradient would be summed in another order each time, so `nn.Embedding` itself is used.
    """
    weight_ND: Tensor = embedding.weight
    rows_BD: Tensor = weight_ND.index_select(0, index_B) if weight_ND.device.type == "cpu" else embedding(index_B)
    return rows_BD


class TextMlp(nn.Module):
    """A map from a text row to a vector of a tower; its norm removes the encoder's scale."""

    def __init__(self, text_dim: int, hidden: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(text_dim)
        self.first = nn.Linear(text_dim, hidden)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(hidden, dim)

    def forward(self, text_BE: Tensor) -> Tensor:
        """Returns [B, D] in the parameters' dtype, since text rows are float32 even if the model is bfloat16."""
        hidden_BH = gelu(self.first(self.norm(text_BE.to(self.first.weight.dtype))))
        vector_BD: Tensor = self.second(self.dropout(hidden_BH))
        return vector_BD
