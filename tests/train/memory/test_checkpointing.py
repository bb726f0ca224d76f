import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from wellfed.train.memory.checkpointing import blocks, checkpoint_blocks


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.linear, self.dropout, self.calls = nn.Linear(width, width), nn.Dropout(0.3), 0

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        return x + scale * self.dropout(torch.tanh(self.linear(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 8), nn.ModuleList([Block() for _ in range(3)])
        self.tail = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Sequential(nn.Linear(8, 1)))

    def forward(self, x):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x, scale=1.0 + number)
        return self.tail(x)


def run(model, seed=3):
    torch.manual_seed(seed)
    output = model(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)))
    output.square().mean().backward()
    return output.detach(), [parameter.grad.clone() for parameter in model.parameters()], torch.rand(2)


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Model()


def test_outputs_gradients_and_the_generator_are_bit_for_bit_the_same(model):
    plain, recomputed = copy.deepcopy(model), copy.deepcopy(model)
    assert checkpoint_blocks(recomputed) == 5
    (output, gradients, after), (same_output, same_gradients, same_after) = run(plain), run(recomputed)
    assert output.equal(same_output)
    assert all(one.equal(two) for one, two in zip(gradients, same_gradients, strict=True))
    assert after.equal(same_after)
    assert not run(plain, seed=4)[0].equal(output)  # dropout is at work


class Codebook(nn.Module):
    """Moves a buffer toward its inputs, and its result depends on the buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        x = self.linear(x) - self.mean
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 2))
        return torch.tanh(x)


def deep(*layers):
    return nn.Sequential(nn.Sequential(nn.Conv1d(8, 8, 1), *layers), nn.Linear(8, 8))


STATEFUL = {
    "BatchNorm": lambda: deep(nn.BatchNorm1d(8)),
    "frozen BatchNorm": lambda: deep(nn.BatchNorm1d(8).eval()),
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8)),
    "a user's module": lambda: deep(Codebook()),
}


def losses_and_state(model, steps=3):
    optimizer, generator = torch.optim.SGD(model.parameters(), 0.1), torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        batch = torch.randn(4, 8, 8, generator=generator)
        loss = model(batch).square().mean() + model(batch + 1).square().mean()  # both before the backward pass
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", STATEFUL)
def test_state_that_a_forward_pass_updates_is_updated_once(name):
    torch.manual_seed(1)
    plain = STATEFUL[name]()
    recomputed = copy.deepcopy(plain)
    checkpoint_blocks(recomputed)
    before = list(recomputed.buffers())
    (losses, state), (same_losses, same_state) = losses_and_state(plain), losses_and_state(recomputed)
    assert losses == same_losses
    assert all(value.equal(same_state[key]) for key, value in state.items())
    if name != "a user's module":  # it replaces its buffer itself
        assert all(one is two for one, two in zip(before, recomputed.buffers(), strict=True))


class NoMemory(TorchDispatchMode):
    """Lets copies of whole numbers, such as BatchNorm's last buffer, run out of memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.clone.default and not args[0].is_floating_point():
            raise torch.OutOfMemoryError("no memory left")
        return func(*args, **(kwargs or {}))


def test_memory_that_runs_out_while_buffers_are_copied_leaves_the_models_own():
    model = deep(nn.BatchNorm1d(8))
    checkpoint_blocks(model)
    before = list(model.buffers())
    loss = model(torch.ones(4, 8, 8)).sum()
    with NoMemory(), pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    assert all(one is two for one, two in zip(before, model.buffers(), strict=True))


def test_each_block_runs_twice_a_step_and_once_in_evaluation(model):
    checkpoint_blocks(model)
    run(model)
    assert [block.calls for block in model.blocks] == [2, 2, 2]
    model.eval()(torch.randn(2, 4))
    assert [block.calls for block in model.blocks] == [3, 3, 3]


def saved_bytes(model):
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: sizes.append(tensor.nbytes) or tensor, lambda x: x):
        model(torch.randn(64, 4))
    return sum(sizes)


def test_less_is_kept_for_the_backward_pass(model):
    before = saved_bytes(model)
    checkpoint_blocks(model)
    assert saved_bytes(model) < 0.7 * before


def test_a_copy_runs_its_own_parameters(model):
    checkpoint_blocks(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert twin(torch.randn(3, 4)).abs().max() == 0
    run(twin)
    assert [block.calls for block in model.blocks] == [0, 0, 0]


def test_which_members_are_blocks(model):
    assert len(list(blocks(model))) == 5  # GELU has nothing to train
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad = False
    assert len(list(blocks(model))) == 4
    assert list(blocks(nn.Linear(2, 2))) == []
    root = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert list(blocks(root)) == [root[0], root[2]]
