import pytest
import torch
from torch import nn
from torch.nn import functional

from wellfed.plan.predict.cuda_emulation import AsOnCuda, backward
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
    with AsOnCuda():
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
    with AsOnCuda():
        assert run().equal(run())


def test_attention_inside_the_layer_has_none_either():
    layer = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True)
    with AsOnCuda():
        first, second = (layer(X, X, X, need_weights=False)[0] for _ in range(2))
    assert first.equal(second)


IN_FLOAT32 = [
    nn.LayerNorm(16, dtype=LOW),
    nn.GroupNorm(2, 8, dtype=LOW),
    nn.RMSNorm(16, dtype=LOW),
    lambda x: torch.pow(x, 3.0),  # GPT-2's activation
    lambda x: x**2,
    lambda x: x.softmax(-1),
    lambda x: functional.log_softmax(x, -1),
]


@pytest.mark.parametrize("run", IN_FLOAT32)
def test_what_runs_in_float32_under_autocast(run):
    x = X.to(LOW)
    with torch.autocast("cpu", LOW):
        assert run(x).dtype == LOW
        with AsOnCuda():
            assert run(x).dtype == torch.float32
            assert functional.relu(x).dtype == LOW
    with AsOnCuda():
        assert run(x).dtype == LOW


def test_an_rnn_runs_in_the_lower_type():
    layer = nn.LSTM(16, 4)
    with AsOnCuda(), torch.autocast("cpu", torch.bfloat16):
        output, (hidden, cell) = layer(X)
    assert {output.dtype, hidden.dtype, cell.dtype} == {torch.bfloat16}
    layer(X)[0].sum().backward()


def test_checkpointed_blocks_do_the_same_the_second_time():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3)) for _ in range(3)))
    checkpoint_blocks(model)
    with AsOnCuda():
        backward(model(X).square().mean())
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_cross_entropy_keeps_its_log_probabilities_in_the_lower_type():
    x, label = X.to(LOW).requires_grad_(), torch.zeros(4, 16, dtype=torch.long)
    with torch.autocast("cpu", LOW):
        assert saved(lambda: functional.cross_entropy(x, label))[1][0] == torch.float32  # all of it on a CPU
        with AsOnCuda():
            loss, kept = saved(lambda: functional.cross_entropy(x, label))
    assert loss.dtype == torch.float32
    assert sorted(map(str, kept))[:2] == ["torch.bfloat16", "torch.float32"]
    loss.backward()
    assert x.grad.dtype == LOW
