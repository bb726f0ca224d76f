"""Models learn on a simulated card what they learn on the CPU, through torch's own autograd and optimizers."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.slow
"""Of the simulated cards by themselves; tests of what runs on them are not."""

TOLERANCE = {"rel": 1e-4, "abs": 1e-6}


class Sequences(nn.Module):
    """An embedding and a recurrent layer."""

    def __init__(self, recurrent: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(50, 16), recurrent(16, 16, num_layers=2, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.recurrent(self.embedding(ids))[0]


class Attention(nn.Module):
    """A transformer block, causal, with a padding mask."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.block = nn.TransformerEncoderLayer(16, 4, 32, dropout, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.block(self.embedding(ids), src_mask=mask, is_causal=True)


class Checkpointed(nn.Module):
    """Activations are computed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, ids, use_reentrant=False)


class Image(nn.Module):
    """Convolutions and normalisations of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3),
            nn.BatchNorm2d(8),
            nn.SiLU(),
            nn.ConvTranspose2d(8, 4, 2),
            nn.GroupNorm(2, 4),
            nn.Flatten(),
            nn.Linear(4 * 49, 8),
            nn.LayerNorm(8),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers((ids[:, :, None] + ids[:, None])[:, None, :8, :8] / 50)


def losses(device: str, make: Callable[[], nn.Module], steps: int = 10) -> list[float]:
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randint(0, 50, (8, 12)).to(device)).float().sin().square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.simulated(cards=2)
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize(
    "make",
    [lambda: Sequences(nn.LSTM), lambda: Sequences(nn.GRU), Attention, Checkpointed, Image],
    ids=["lstm", "gru", "attention", "checkpointed", "image"],
)
def test_training_is_that_of_the_cpu(make: Callable[[], nn.Module], device: str) -> None:
    import fake_cuda

    assert losses(device, make) == pytest.approx(losses("cpu", make), **TOLERANCE)
    assert fake_cuda.driver.violations() == []


@pytest.mark.simulated
def test_the_scaler_skips_a_step_that_overflows() -> None:
    layer = nn.Linear(2, 1).cuda()
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=1.0), torch.amp.GradScaler("cuda", init_scale=4.0)
    before = layer.weight.detach().clone()
    for value, moves, scale in ((float("inf"), False, 2.0), (1.0, True, 2.0)):
        optimizer.zero_grad()
        scaler.scale(layer(torch.full((1, 2), value, device="cuda")).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert bool((layer.weight != before).all()) is moves
        assert scaler.get_scale() == scale
    assert torch.allclose(layer.weight, before - 1)


@pytest.mark.simulated(cards=2)
@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_devices_do_not_mix(other: str) -> None:
    with pytest.raises(RuntimeError, match="two devices"):
        torch.ones(2, device="cuda:0") + torch.ones(2, device=other)
    with pytest.raises(RuntimeError, match="two devices"):
        nn.Linear(2, 2).cuda()(torch.ones(1, 2, device=other))
    assert (torch.ones(2, device="cuda:0") + torch.tensor(1.0)).tolist() == [2, 2]  # a number may be of the host


@pytest.mark.simulated
@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.sort(stable=True),
        lambda x: x[x > 0],
        lambda x: torch.fft.rfft(x).real,
        lambda x: x.index_select(0, torch.tensor([1, 0], device=x.device)),
        lambda x: torch.zeros(3, 3, device=x.device).index_put_((torch.tensor([0, 1]),), x[0, :3]),
        lambda x: nn.functional.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
        lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
        lambda x: torch.einsum("ij,kj->ik", x, x),
    ],
)
def test_operators_give_what_the_cpu_gives(call: Callable[[torch.Tensor], object]) -> None:
    torch.manual_seed(0)
    host = torch.randn(4, 6)
    found, expected = call(host.cuda()), call(host)
    for one, other in zip(
        [found] if isinstance(found, torch.Tensor) else found,
        [expected] if isinstance(expected, torch.Tensor) else expected,
        strict=True,
    ):
        assert one.is_cuda
        assert torch.allclose(one.cpu().resolve_conj(), other.resolve_conj(), atol=1e-5)
