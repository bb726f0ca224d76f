"""Models learn on a simulated card what they learn on the CPU, through torch's own autograd and optimizers."""

import copy
from collections.abc import Callable
from pathlib import Path

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


def losses(device: str, make: Callable[[], nn.Module], optimizer: str = "AdamW", steps: int = 10) -> list[float]:
    torch.manual_seed(0)
    model = make().to(device)
    chosen = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randint(0, 50, (8, 12)).to(device)).float().sin().square().mean()
        chosen.zero_grad()
        loss.backward()
        if optimizer != "SparseAdam":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        chosen.step()
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
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Adagrad", "SparseAdam"])
def test_optimizers_learn_the_same(optimizer: str) -> None:
    def make() -> nn.Module:
        return nn.Embedding(50, 16, sparse=optimizer == "SparseAdam")

    assert losses("cuda", make, optimizer) == pytest.approx(losses("cpu", make, optimizer), **TOLERANCE)


@pytest.mark.simulated
def test_sparse_gradients_stay_on_the_card() -> None:
    layer = nn.Embedding(50, 16, sparse=True).cuda()
    layer(torch.tensor([1, 2, 2], device="cuda")).sum().backward()
    gradient = layer.weight.grad
    assert (gradient.is_sparse, gradient.device) == (True, torch.device("cuda:0"))
    assert gradient.coalesce().indices().tolist() == [[1, 2]]
    assert gradient.to_dense()[2].tolist() == [2.0] * 16


@pytest.mark.simulated
def test_autocast_casts() -> None:
    layer, norm = nn.Linear(4, 4).cuda(), nn.LayerNorm(4).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        out = layer(torch.ones(2, 4, device="cuda"))
        assert out.dtype == torch.bfloat16
        assert norm(out).dtype == torch.float32
        assert nn.functional.cross_entropy(out, torch.zeros(2, dtype=torch.long, device="cuda")).dtype == torch.float32
    out.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


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
def test_dropout_gives_back_its_mask() -> None:
    held = torch.ones(1000, device="cuda", requires_grad=True)
    out = nn.functional.dropout(held, 0.25)
    out.sum().backward()
    assert torch.equal(held.grad, out.detach())
    assert torch.allclose(out[out != 0], torch.tensor(4 / 3, device="cuda"))
    assert 150 < int((out == 0).sum()) < 350


@pytest.mark.simulated
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_with_dropout_has_the_gradient_of_its_mask(is_causal: bool) -> None:
    """Backward draws the mask of forward again; what it then gives is what autograd gives for the written formula."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, 5, 4, device="cuda", requires_grad=True) for _ in range(3))
    state = torch.cuda.get_rng_state()
    out = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.3, is_causal=is_causal)
    gradients = torch.autograd.grad(out.square().sum(), (query, key, value))
    torch.cuda.set_rng_state(state)
    scores = query @ key.mT / 2
    if is_causal:
        scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool, device="cuda").triu(1), float("-inf"))
    kept = torch.empty(2, 2, 5, 5, device="cuda").bernoulli_(0.7) / 0.7
    expected = (scores.softmax(-1) * kept) @ value
    assert torch.allclose(out, expected, atol=1e-5)
    for found, wanted in zip(gradients, torch.autograd.grad(expected.square().sum(), (query, key, value)), strict=True):
        assert torch.allclose(found, wanted, atol=1e-4)


@pytest.mark.simulated
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_keeps_no_weights(dropout: float) -> None:
    """Its memory grows with the length, not with its square, as that of the CUDA kernels."""
    query = torch.randn(2, 2, 512, 16, device="cuda", requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=dropout).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 10 * query.nbytes < 4 * 2 * 2 * 512 * 512


@pytest.mark.simulated(cards=2)
@pytest.mark.parametrize("where", ["cpu", "cuda:0", "cuda:1", None])
def test_saved_tensors_are_loaded_where_they_are_wanted(where: str | None, tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).to("cuda:1").state_dict(), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", map_location=where)
    assert loaded["weight"].device == torch.device(where or "cuda:1")
    assert loaded["weight"].sum().isfinite()


@pytest.mark.simulated(cards=4)
def test_a_data_parallel_learns_what_one_module_learns() -> None:
    import fake_cuda

    torch.manual_seed(0)
    inputs, model = torch.randn(10, 6), nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    model.eval()  # each card would normalise its own samples
    alone = copy.deepcopy(model)
    whole = nn.DataParallel(model.cuda())
    for net, given in ((alone, inputs), (whole, inputs), (whole, inputs.cuda())):
        net.zero_grad()
        net(given).square().mean().backward()
        found = [one.grad.cpu().flatten() for one in net.parameters()]
        expected = [one.grad.flatten() for one in alone.parameters()]
        assert torch.cat(found).tolist() == pytest.approx(torch.cat(expected).tolist(), **TOLERANCE)
    assert whole(inputs).get_device() == 0
    assert [fake_cuda.driver.has_context(card) for card in range(4)] == [True] * 4
    assert fake_cuda.driver.violations() == []


@pytest.mark.simulated
@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.sort(stable=True),
        lambda x: x.topk(2),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: torch.fft.rfft(x).real,
        lambda x: x.to(torch.complex64).conj() * 2,
        torch.linalg.svdvals,
        lambda x: torch.cat([x, x], 1).view(-1)[::3],
        lambda x: torch.cdist(x, x),
        lambda x: x.index_select(0, torch.tensor([1, 0], device=x.device)),
        lambda x: torch.zeros(3, 3, device=x.device).index_put_((torch.tensor([0, 1]),), x[0, :3]),
        lambda x: nn.functional.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
        lambda x: torch.arange(5, device=x.device).repeat_interleave(2),
        lambda x: torch.empty(0, device=x.device).resize_(4).fill_(1),
        lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
        lambda x: torch.std_mean(x, 0),
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
