import pytest
import torch
from torch import nn
from torch.nn import functional

from wellfed.plan.predict import cuda_emulation
from wellfed.plan.predict.cuda_emulation import as_on_cuda, backward
from wellfed.train.memory.checkpointing import checkpoint_blocks

X = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))
LOW = torch.bfloat16


def saved(run):
    """Types and sizes of what is kept for the backward pass."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        result = run()
    return result, [each.dtype for each in kept]


def test_dropout_keeps_a_mask_of_bytes():
    x = X.clone().requires_grad_()
    layer = nn.Dropout(0.5)
    assert torch.bool not in saved(lambda: layer(x))[1]
    with as_on_cuda():
        assert saved(lambda: layer(x))[1] == [torch.bool]
        made = layer(x)
        assert 0.3 < (made == 0).float().mean() < 0.7
        assert made[made != 0].allclose(2 * x[made != 0])
        assert layer.eval()(x).equal(x)
        assert functional.dropout(X.clone(), 0.5, True, True).shape == X.shape


@pytest.mark.parametrize("positional", [True, False])
def test_attention_has_no_weights_in_memory(positional):
    q = X[:, None].clone().requires_grad_()
    arguments = ((None, 0.5, True), {}) if positional else ((), {"dropout_p": 0.5, "is_causal": True})

    def run():
        return functional.scaled_dot_product_attention(q, q, q, *arguments[0], **arguments[1])

    assert not run().equal(run())
    with as_on_cuda():
        assert run().equal(run())


def test_attention_inside_the_layer_has_none_either():
    layer = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True)
    with as_on_cuda():
        first, second = (layer(X, X, X, need_weights=False)[0] for _ in range(2))
    assert first.equal(second)


@pytest.mark.parametrize(
    ("run", "cpu"),
    [
        (lambda x: functional.layer_norm(x, (16,)), torch.bfloat16),
        (nn.GroupNorm(2, 8, dtype=torch.bfloat16), torch.bfloat16),
        (lambda x: x.softmax(-1), torch.bfloat16),
        (lambda x: functional.log_softmax(x, -1), torch.bfloat16),
        (lambda x: x**2, torch.bfloat16),
        (lambda x: x.sum(), torch.bfloat16),
        (lambda x: x * 2, None),
        (torch.relu, None),
    ],
)
def test_autocast_by_cudas_list(run, cpu):
    x = X.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert run(x).dtype == torch.bfloat16
        with as_on_cuda():
            assert run(x).dtype == (torch.bfloat16 if cpu is None else torch.float32)
    with as_on_cuda():
        assert run(x).dtype == torch.bfloat16


def test_an_rnn_runs_in_the_lower_type():
    layer = nn.LSTM(16, 4)
    with as_on_cuda(), torch.autocast("cpu", torch.bfloat16):
        output, (hidden, cell) = layer(X)
    assert {output.dtype, hidden.dtype, cell.dtype} == {torch.bfloat16}
    layer(X)[0].sum().backward()


def test_checkpointed_blocks_do_the_same_the_second_time():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3)) for _ in range(3)))
    checkpoint_blocks(model)
    with as_on_cuda():
        backward(model(X).square().mean())
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_the_switch_is_as_it_was():
    before = torch.backends.mkldnn.enabled
    with as_on_cuda():
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled == before


def test_the_lists_are_those_that_torch_has_registered_for_cuda():
    lists = (cuda_emulation.LOWER, cuda_emulation.FLOAT32, cuda_emulation.FLOAT32_RESULT, cuda_emulation.WIDEST)
    ours = [name for text in (*lists, cuda_emulation.AS_GIVEN) for name in text.split()] + list(cuda_emulation.NORM)
    assert len(ours) == len(set(ours))
    theirs = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    assert {f"aten::{name}" for name in ours} == {name for name in theirs if name.startswith("aten::")}


@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        (lambda x: functional.layer_norm(x, (16,)), torch.float32),
        (lambda x: functional.rms_norm(x, (16,)), torch.float32),
        (lambda x: x.softmax(-1), torch.float32),
        (lambda x: x.softmax(-1, dtype=LOW), LOW),
        (lambda x: functional.log_softmax(x, -1), torch.float32),
        (lambda x: x.logsumexp(-1), torch.float32),
        (lambda x: x**2, torch.float32),
        (lambda x: x.sum(), torch.float32),
        (lambda x: x.sum(1), torch.float32),
        (lambda x: x.norm(), torch.float32),
        (lambda x: x.norm(dim=1), torch.float32),
        (lambda x: x.cumsum(0), torch.float32),
        (lambda x: functional.huber_loss(x, x), torch.float32),
        (lambda x: functional.interpolate(x, scale_factor=2), torch.float32),
        (lambda x: functional.interpolate(x[None], scale_factor=2, mode="bilinear"), torch.float32),
        (lambda x: functional.cosine_similarity(x, x), torch.float32),
        (lambda x: x.float() @ x.mT.float(), LOW),
        (lambda x: torch.einsum("bij,bkj->bik", x.float(), x.float()), LOW),
        (lambda x: torch.addcmul(x, x, x.float()), torch.float32),
        (lambda x: torch.addcmul(x, x, x), LOW),
        (lambda x: functional.pad(x, (1, 1), mode="reflect"), LOW),  # the CPU's list has it, CUDA's has not
        (lambda x: torch.cat([x, x.float()]), torch.float32),
        (lambda x: x * 2, LOW),
        (torch.relu, LOW),
        (lambda x: x.double().sum(), torch.float64),
    ],
)
def test_operators_run_in_cudas_types(run, dtype):
    x = X.to(LOW)
    with as_on_cuda(), torch.autocast("cpu", LOW):
        assert run(x).dtype == dtype


def test_cross_entropy_keeps_its_log_probabilities_in_the_lower_type():
    x, label = X.to(LOW).requires_grad_(), torch.zeros(4, 16, dtype=torch.long)
    with torch.autocast("cpu", LOW):
        assert saved(lambda: functional.cross_entropy(x, label))[1][0] == torch.float32  # all of it on a CPU
        with as_on_cuda():
            loss, kept = saved(lambda: functional.cross_entropy(x, label))
    assert loss.dtype == torch.float32
    assert kept[0] == LOW
    loss.backward()
    assert x.grad.dtype == LOW


def test_without_autocast_nothing_changes_and_afterwards_all_is_as_it_was():
    x = X.to(LOW)
    with as_on_cuda():
        assert x.softmax(-1).dtype == LOW
    with torch.autocast("cpu", LOW):
        assert x.softmax(-1).dtype == LOW
        assert functional.pad(x, (1, 1), mode="reflect").dtype == torch.float32
