"""A card that computes nothing: shapes, time, and the numbers that others are chosen and divided by."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.slow
"""Of the simulated cards by themselves; tests of what runs on them are not."""

FAST: dict[str, Any] = {"computes": False, "tflops": 1.0, "dram_gbps": 100.0, "sms": 4}
SIDE = 2048


class Everything(nn.Module):
    """Layers of all kinds, each with results beyond what is computed all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 32)
        self.lstm = nn.LSTM(32, 48, 2, dropout=0.1, batch_first=True)
        self.images = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Dropout(0.1))
        self.attention = nn.TransformerEncoderLayer(48, 4, 64, batch_first=True)
        self.last = nn.Linear(48, 10)

    def forward(self, words: Tensor, images: Tensor) -> Tensor:
        seen = self.attention(self.lstm(self.table(words))[0])
        return self.last(seen.mean(1)) + self.images(images).mean()


def shapes_after_a_step(device: str) -> list[tuple[Any, ...]]:
    model = Everything().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    words = torch.randint(0, 500, (16, 40), device=device)
    loss = model(words, torch.rand(16, 3, 32, 32, device=device)).square().mean()
    loss.backward()
    found = [(each.grad.shape, each.grad.dtype) for each in model.parameters() if each.grad is not None]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert torch.isfinite(loss)
    return [(loss.shape, loss.dtype), *found]


@pytest.mark.simulated(**FAST)
def test_a_step_has_the_shapes_of_one_that_computes() -> None:
    import fake_cuda

    assert shapes_after_a_step("cuda") == shapes_after_a_step("cpu")
    assert fake_cuda.driver.violations() == []


@pytest.mark.simulated(**FAST)
def test_what_is_large_is_not_computed_and_takes_its_time() -> None:
    ones = torch.ones(SIDE, SIDE).cuda()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    product = ones @ ones
    last.record()
    last.synchronize()
    expected_ms = 2e3 * SIDE**3 / 1e12
    assert expected_ms <= first.elapsed_time(last) < 20 * expected_ms  # and the host's time to launch it
    assert product.shape == (SIDE, SIDE)
    assert not (product.cpu() == SIDE).any()


@pytest.mark.simulated(**FAST)
def test_numbers_that_count_are_right() -> None:
    rows, small = torch.arange(SIDE * SIDE).view(SIDE, SIDE), torch.arange(64.0)
    on_card = rows.cuda()
    assert torch.equal(on_card.cpu(), rows)
    assert torch.equal((on_card[5] * 2 + 1).cpu(), rows[5] * 2 + 1)
    assert torch.equal(on_card.double().sum(1).cpu(), rows.double().sum(1))
    assert torch.equal((small.cuda() ** 2)[on_card[0, :9]].cpu(), small[:9] ** 2)


@pytest.mark.simulated(**FAST)
def test_what_comes_of_no_numbers_may_be_divided_by_and_chosen_by() -> None:
    large = torch.empty(SIDE, SIDE, device="cuda")
    assert large.mean().item() == 1
    assert (large.sum() / large.abs().max()).item() == 1
    assert large.argmax(1).unique().tolist() == [0]
    part = torch.empty(8, device="cuda").copy_(large[0, :8])
    assert part.tolist() == [1] * 8
    given = torch.empty(0, device="cuda")
    torch.sum(large, 1, out=given)
    assert given.shape == (SIDE,)


@pytest.mark.simulated(**FAST)
def test_without_a_roofline_it_can_t_be(monkeypatch: pytest.MonkeyPatch) -> None:
    import fake_cuda

    assert fake_cuda.computes() is False
    monkeypatch.delenv("FAKE_CUDA_TFLOPS")
    with pytest.raises(ValueError, match="needs FAKE_CUDA_TFLOPS"):
        fake_cuda.computes()
