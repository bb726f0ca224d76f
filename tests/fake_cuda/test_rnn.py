"""LSTM, GRU and plain RNN of a simulated card: one call each way, as by cuDNN, and what the CPU computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

INPUTS, HIDDEN, BATCH = 5, 8, 3
TOLERANCE = {"atol": 1e-5, "rtol": 1e-4}
CELLS: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "batch_first": True}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "bias": False}),
    (nn.LSTM, {"num_layers": 2, "proj_size": 4, "bidirectional": True}),
    (nn.GRU, {"num_layers": 3, "batch_first": True}),
    (nn.RNN, {"bidirectional": True}),
    (nn.RNN, {"nonlinearity": "relu"}),
]
IDS = ["lstm", "lstm-batch-first", "lstm-both-ways-no-bias", "lstm-projected", "gru", "rnn-both-ways", "rnn-relu"]
CELL_CASES = pytest.mark.parametrize(("cell", "options"), CELLS, ids=IDS)
FAST: dict[str, Any] = {"computes": False, "tflops": 1.0, "dram_gbps": 100.0, "sms": 4}
pytestmark = [
    pytest.mark.slow,  # of the simulated cards by themselves; tests of what runs on them are not
    pytest.mark.filterwarnings("ignore:LSTM with projections"),  # of oneDNN, on the CPU
]


def made(cell: type[nn.RNNBase], device: str, **options: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    return cell(INPUTS, HIDDEN, **options).to(device)


def all_of(result: Any) -> list[Tensor]:
    """The output and the one or two states after it."""
    output, states = result
    return [output, *(states if isinstance(states, tuple) else [states])]


def given(device: str, size: tuple[int, ...] = (BATCH, 6, INPUTS)) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(size).to(device).requires_grad_()


def trained(layer: nn.RNNBase, inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Results of a call, and gradients of the input and the weights, on the host."""
    results = all_of(layer(inputs))
    loss = sum((each * (number + 1)).sin().sum() for number, each in enumerate(results))
    gradients = torch.autograd.grad(loss, [inputs, *layer.parameters()])
    return [each.detach().cpu() for each in results], [each.cpu() for each in gradients]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(
        torch.allclose(one, other, **TOLERANCE) for one, other in zip(found, expected, strict=True)
    )


def num_launches(layer: nn.RNNBase, length: int) -> int:
    """Of a step that trains it."""
    import fake_cuda

    inputs = given("cuda", (BATCH, length, INPUTS))
    before = fake_cuda.driver.counts()["launches"]
    layer(inputs)[0].sum().backward()
    return fake_cuda.driver.counts()["launches"] - before


@pytest.mark.simulated
@CELL_CASES
def test_results_and_gradients_are_those_of_the_cpu(cell: type[nn.RNNBase], options: dict[str, Any]) -> None:
    import fake_cuda

    found, expected = (trained(made(cell, device, **options), given(device)) for device in ("cuda", "cpu"))
    assert same(found[0], expected[0])
    assert same(found[1], expected[1])
    assert fake_cuda.driver.violations() == []


@pytest.mark.simulated
def test_states_before_the_sequence_are_learned() -> None:
    found = []
    for device in ("cuda", "cpu"):
        layer, inputs = made(nn.LSTM, device, num_layers=2).requires_grad_(False), given(device)
        torch.manual_seed(2)
        before = [torch.randn(2, inputs.shape[1], HIDDEN).to(device).requires_grad_() for _ in range(2)]
        _, (_, last_cells) = layer(inputs, before)
        found.append([each.cpu() for each in torch.autograd.grad(last_cells[0].sum(), before)])
    assert same(*found)
    assert found[0][1][0].abs().sum() > 0


@pytest.mark.simulated(**FAST)
@CELL_CASES
def test_shapes_are_those_of_the_cpu(cell: type[nn.RNNBase], options: dict[str, Any]) -> None:
    def shapes(device: str) -> list[Any]:
        results, gradients = trained(made(cell, device, **options), given(device, (64, 64, INPUTS)))
        return [(each.shape, each.dtype) for each in results + gradients]

    assert shapes("cuda") == shapes("cpu")


@pytest.mark.simulated
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_launches_do_not_grow_with_the_sequence(cell: type[nn.RNNBase]) -> None:
    layer = made(cell, "cuda", num_layers=2, batch_first=True)
    num_launches(layer, 3)
    assert num_launches(layer, 4) == num_launches(layer, 40) < 30
    with torch.backends.cudnn.flags(enabled=False):
        assert num_launches(layer, 40) > 40


@pytest.mark.simulated
def test_dropout_between_layers_has_the_gradient_of_its_mask() -> None:
    """By differences, with the numbers drawn again; and the numbers go on from call to call."""
    layer = made(nn.LSTM, "cuda", num_layers=2, dropout=0.5).double()
    inputs = given("cuda").detach().double().requires_grad_()
    host = torch.get_rng_state()

    def drawn(at: Tensor) -> Tensor:
        torch.cuda.manual_seed(5)
        return layer(at)[0].square().sum()

    (gradient,) = torch.autograd.grad(drawn(inputs), inputs)
    direction = torch.randn_like(inputs)
    step = 1e-4
    difference = (drawn(inputs + step * direction) - drawn(inputs - step * direction)) / (2 * step)
    assert torch.allclose(difference, (gradient * direction).sum(), rtol=1e-5)
    assert not torch.equal(layer(inputs)[0], layer(inputs)[0])
    assert torch.equal(layer.eval()(inputs)[0], layer(inputs)[0])
    assert torch.equal(torch.get_rng_state(), host)


@pytest.mark.simulated
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_autocast_runs_it_in_the_lower_type(cell: type[nn.RNNBase]) -> None:
    layer, inputs = made(cell, "cuda"), given("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        results = all_of(layer(inputs))
    assert {each.dtype for each in results} == {torch.bfloat16}
    results[0].sum().backward()
    assert {each.grad.dtype for each in layer.parameters() if each.grad is not None} == {torch.float32}
    assert torch.allclose(results[0].float(), layer(inputs)[0], atol=0.03)


@pytest.mark.simulated
def test_packed_sequences_are_computed() -> None:
    found = []
    for device in ("cuda", "cpu"):
        packed = pack_padded_sequence(given(device), torch.tensor([6, 4, 1]), batch_first=True)
        found.append(pad_packed_sequence(made(nn.LSTM, device, batch_first=True)(packed)[0])[0].detach().cpu())
    assert torch.allclose(*found, **TOLERANCE)


@pytest.mark.simulated
def test_without_training_there_is_no_reserve_and_no_way_back() -> None:
    layer, inputs = made(nn.LSTM, "cuda", num_layers=2), torch.randn(100, 40, INPUTS, device="cuda")

    def kept() -> tuple[int, Tensor]:
        before = torch.cuda.memory_allocated()
        output = layer(inputs)[0]
        return torch.cuda.memory_allocated() - before - output.nbytes, output

    # 6 numbers for each state of a layer, less the last layer's: pytorch/pytorch#2895
    reserve = (6 * 2 - 1) * 100 * 40 * HIDDEN * 4
    with_training, output = kept()
    assert reserve <= with_training < 1.1 * reserve
    output.sum().backward()
    layer.eval()
    without, output = kept()
    assert without < 0.1 * reserve
    with pytest.raises(RuntimeError, match="can only be called in training mode"):
        output.sum().backward()


def took_ms(call: Callable[[], object]) -> float:
    """Of the card, the second time. It is so far behind the host that it never waits for it."""
    call()
    ahead = torch.ones(512, 512, device="cuda")
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    ahead @ ahead
    first.record()
    call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last)


@pytest.mark.simulated(tflops=1e-3, sms=4, kernel_us=1000.0)
@pytest.mark.parametrize(("both_ways", "waiting"), [(False, 20 + 2), (True, 20 * 3)])
def test_a_step_of_the_sequence_waits_for_the_one_before(both_ways: bool, waiting: int) -> None:
    """Two kernels of a millisecond each; a layer follows the one below it by a step, or waits for all of both ways."""
    layer = made(nn.GRU, "cuda", num_layers=3, bidirectional=both_ways)
    inputs, zeros = torch.randn(20, 2, INPUTS, device="cuda"), torch.zeros(6 if both_ways else 3, 2, HIDDEN).cuda()
    with torch.no_grad():
        assert took_ms(lambda: layer(inputs, zeros)) == pytest.approx(2 * waiting, rel=0.05)


@pytest.mark.simulated(tflops=1e-3, tensor_tflops=4e-3, sms=4)
def test_its_arithmetic_takes_its_time() -> None:
    """A nanosecond an operation of float32; each step fills the card."""
    torch.backends.cudnn.allow_tf32 = False
    layer = nn.LSTM(32, 64, device="cuda")
    inputs = torch.randn(4, 64, 32, device="cuda", requires_grad=True)
    zeros = [torch.zeros(1, 64, 64, device="cuda") for _ in range(2)]
    forward_ms = 2 * 4 * 64 * 4 * 64 * (32 + 64) / 1e6
    assert took_ms(lambda: layer(inputs, zeros)) == pytest.approx(forward_ms, rel=0.01)
    output = layer(inputs, zeros)[0]
    wanted = torch.ones_like(output)
    for leaves, times in ([inputs], 1), ([inputs, *layer.parameters()], 2):
        took = took_ms(lambda: torch.autograd.grad(output, leaves, wanted, retain_graph=True))  # noqa: B023  at once
        assert took == pytest.approx(times * forward_ms, rel=0.02)
    torch.backends.cudnn.allow_tf32 = True
    assert took_ms(lambda: layer(inputs, zeros)) == pytest.approx(forward_ms / 2, rel=0.01)
