import copy

import pytest
import torch
from torch import nn

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


def test_twice_is_once(model):
    checkpoint_blocks(model)
    checkpoint_blocks(model)
    run(model)
    assert [block.calls for block in model.blocks] == [2, 2, 2]


def test_names_of_the_weights_stay(model):
    before = list(model.state_dict())
    checkpoint_blocks(model)
    assert list(model.state_dict()) == before


def test_which_members_are_blocks(model):
    assert len(list(blocks(model))) == 5  # GELU has nothing to train
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad = False
    assert len(list(blocks(model))) == 4
    assert list(blocks(nn.Linear(2, 2))) == []
    root = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert list(blocks(root)) == [root[0], root[2]]
