"""Models of many kinds, small: what an estimate of memory is tried on."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from wellfed.contract import Batch, Features, FeatureSource, LossOutput
from wellfed.sample_rng import SampleRng


class Mlp(nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 10)
        )

    def loss(self, batch: Batch) -> LossOutput:
        return LossOutput(functional.cross_entropy(self.layers(batch["x"]), batch["label"]))


class Conv(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(4)
        )
        self.head = nn.Linear(width, 10)

    def loss(self, batch: Batch) -> LossOutput:
        x = self.stem(batch["x"].float() / 255)
        for block in self.blocks:
            x = x + block(x)
        return LossOutput(functional.cross_entropy(self.head(x.mean((2, 3))), batch["label"]))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 64, num_layers=2, batch_first=True), nn.Linear(64, 1)

    def loss(self, batch: Batch) -> LossOutput:
        hidden, _ = self.lstm(batch["x"])
        return LossOutput(functional.mse_loss(self.head(hidden[:, -1]).squeeze(1), batch["y"]))


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=dropout, batch_first=True)
        self.embed, self.layers = nn.Embedding(1000, 64), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(64, 1000)
        for each in self.layers.layers:  # a simulated card has no fused attention with dropout
            each.self_attn.dropout = 0.0

    def loss(self, batch: Batch) -> LossOutput:
        logits = self.head(self.layers(self.embed(batch["x"])))
        return LossOutput(functional.cross_entropy(logits.flatten(0, 1), batch["x"].flatten()))


class FrozenEncoder(nn.Module):
    """Ids through a table and an encoder that is not trained, then a head that is."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.ids = nn.Embedding(5000, 64)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).requires_grad_(False).eval()
        self.head = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
        self.register_buffer("texts", torch.randn(600, 8, 64))

    def features(self) -> Features:
        return Features(600, 600 * 64 * 4, self._rows)

    def _rows(self, indices: Tensor) -> Tensor:
        with torch.no_grad():
            return cast(Tensor, self.encoder(self.texts.index_select(0, indices)).mean(1))

    def loss(self, batch: Batch) -> LossOutput:
        score = self.head(self.ids(batch["user"]) + batch["text"]).squeeze(1)
        return LossOutput(functional.binary_cross_entropy_with_logits(score, batch["y"]))


class TextOfItems:
    """Preparation of batches on the device for `FrozenEncoder`."""

    def on_device(self, batch: Batch, rng: SampleRng, features: FeatureSource) -> Batch:
        return batch | {"text": features.rows(batch["item"])}


class ResNet(nn.Module):
    """Residual blocks with BatchNorm."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(3)
        )
        self.head = nn.Linear(width, 10)

    def loss(self, batch: Batch) -> LossOutput:
        x = self.stem(batch["x"].float() / 255)
        for block in self.blocks:
            x = functional.relu(x + block(x))
        return LossOutput(functional.cross_entropy(self.head(x.mean((2, 3))), batch["label"]))


class UNet(nn.Module):
    """Down, up, and the skips between."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList(self._block(before, after) for before, after in ((3, width), (width, 2 * width)))
        self.middle = self._block(2 * width, 4 * width)
        self.up = nn.ModuleList(self._block(6 * width if n else 3 * width, (n + 1) * width) for n in (1, 0))
        self.out = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _block(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU())

    def loss(self, batch: Batch) -> LossOutput:
        clean = batch["x"].float() / 255
        x, skips = clean + 0.1 * torch.randn_like(clean), []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = functional.interpolate(x, scale_factor=2, mode="bilinear")
            x = block(torch.cat([x, skips.pop()], 1))
        return LossOutput(functional.l1_loss(self.out(x), clean))


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.place = nn.Parameter(torch.zeros(1, 64, width))
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def loss(self, batch: Batch) -> LossOutput:
        x = self.patches(batch["x"].float() / 255).flatten(2).transpose(1, 2) + self.place
        return LossOutput(functional.cross_entropy(self.head(self.layers(x).mean(1)), batch["label"]))


class LowRank(nn.Module):
    """A frozen linear layer and a trained correction of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.base(x) + self.up(self.down(x)))


class LanguageModel(nn.Module):
    """Causal attention over tokens; all frozen but low-rank corrections."""

    def __init__(self, width: int = 64, vocabulary: int = 2000) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width).requires_grad_(False)
        self.norms = nn.ModuleList(nn.LayerNorm(width).requires_grad_(False) for _ in range(6))
        self.qkv = nn.ModuleList(LowRank(nn.Linear(width, 3 * width)) for _ in range(3))
        self.mix = nn.ModuleList(LowRank(nn.Linear(width, width)) for _ in range(3))
        self.wide = nn.ModuleList(LowRank(nn.Linear(width, 4 * width)) for _ in range(3))
        self.narrow = nn.ModuleList(LowRank(nn.Linear(4 * width, width)) for _ in range(3))

    def loss(self, batch: Batch) -> LossOutput:
        tokens = batch["x"]
        x = self.tokens(tokens)
        for n in range(3):
            q, k, v = (
                part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv[n](self.norms[2 * n](x)).chunk(3, -1)
            )
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.mix[n](attended.transpose(1, 2).flatten(2))
            x = x + self.narrow[n](functional.gelu(self.wide[n](self.norms[2 * n + 1](x))))
        logits = functional.linear(x[:, :-1], self.tokens.weight)
        return LossOutput(functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


class Volume(nn.Module):
    """Convolutions in three dimensions."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool3d(2),
            nn.Conv3d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool3d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 10),
        )

    def loss(self, batch: Batch) -> LossOutput:
        return LossOutput(functional.cross_entropy(self.layers(batch["x"]), batch["label"]))


class SparseTable(nn.Module):
    """An embedding whose gradient holds the rows that were looked up, and nothing else."""

    def __init__(self, rows: int = 100_000, width: int = 32, *, sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width, sparse=sparse)

    def loss(self, batch: Batch) -> LossOutput:
        return LossOutput((self.table(batch["ids"]).mean(1).sum(1) - batch["y"]).square().mean())


class Neighbours(nn.Module):
    """Edges between each point and its nearest ones, by gather."""

    def __init__(self, width: int = 48, num: int = 16) -> None:
        super().__init__()
        self.num = num
        self.first, self.edges, self.head = nn.Linear(3, width), nn.Linear(2 * width, width), nn.Linear(width, 10)

    def loss(self, batch: Batch) -> LossOutput:
        points_BNC = batch["points"]
        near_BNK = torch.cdist(points_BNC, points_BNC).topk(self.num, largest=False).indices
        x_BNC = self.first(points_BNC)
        num_points, width = x_BNC.shape[1:]
        index = near_BNK[..., None].expand(-1, -1, -1, width)
        near_BNKC = x_BNC[:, None].expand(-1, num_points, -1, -1).gather(2, index)
        edges = torch.cat([near_BNKC - x_BNC[:, :, None], x_BNC[:, :, None].expand_as(near_BNKC)], -1)
        pooled = functional.relu(self.edges(edges)).amax(2).amax(1)
        return LossOutput(functional.cross_entropy(self.head(pooled), batch["label"]))


class GradientPenalty(nn.Module):
    """A critic whose slope at its inputs is part of the loss."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def loss(self, batch: Batch) -> LossOutput:
        x = batch["x"].detach().requires_grad_()
        score = self.layers(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return LossOutput(score.mean() + 10 * (slope.norm(dim=1) - 1).square().mean())


class FrozenMixture(nn.Module):
    """Frozen experts behind a trained gate and a trained head."""

    def __init__(self, width: int = 256, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(64, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width)).requires_grad_(False)
            for _ in range(experts)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))

    def loss(self, batch: Batch) -> LossOutput:
        shares = self.gate(batch["x"]).softmax(-1)
        mixed = sum(shares[:, n, None] * expert(batch["x"]) for n, expert in enumerate(self.experts))
        return LossOutput(functional.cross_entropy(self.head(mixed), batch["label"]))
