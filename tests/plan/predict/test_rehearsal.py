"""The rehearsal does what training does: a run takes the memory that was predicted."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kit import loop, tiny
from tests.kit.few import slow
from wellfed import batches
from wellfed.contract import LossOutput
from wellfed.plan.predict.cuda_emulation import AsOnCuda
from wellfed.plan.predict.peak import StepShape, predicted_peak
from wellfed.plan.predict.rehearsal import Rehearsal, Task, measure
from wellfed.train.memory.checkpointing import checkpoint_blocks

SAMPLES = 2048


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
        self.first, self.last = nn.Linear(tiny.WIDTH, 64), nn.Linear(64, 1)

    def loss(self, batch):
        return LossOutput((self.last(self.blocks(self.first(batch["x"]))) - batch["y"]).square().mean())


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), foreach=True)


def task(sample, **more):
    return Task(partial(batches.repeated, sample), make_optimizer, **more)


@pytest.mark.parametrize(
    ("precision", "micro", "checkpointed"),
    [
        ("bf16-mixed", 1024, True),
        *(
            slow(*case)  # the same in other pairs
            for case in [
                ("32-true", SAMPLES, False),
                ("32-true", 512, False),
                ("32-true", 1024, True),
                ("bf16-mixed", SAMPLES, False),
                ("bf16-mixed", 512, False),
                ("bf16-true", SAMPLES, False),
                ("bf16-true", 512, False),
                ("bf16-true", 1024, True),
            ]
        ),
    ],
)
def test_a_run_takes_what_was_predicted(precision, micro, checkpointed):
    from benchmarks.memory_counter import Counter

    model, data = Wide(), tiny.TinyData(SAMPLES)
    sample = data.fetch(torch.arange(SAMPLES), tiny.SampleRng(0, 0))
    found = measure(model, task(sample, precision=precision, checkpointed=checkpointed), SAMPLES, block_bytes=1)
    predicted = predicted_peak(found, micro, StepShape(SAMPLES))
    # On a CPU the loader's batch lies beside its copy of another type.
    beside = batches.num_bytes(sample) if precision == "bf16-true" else 0
    if checkpointed:
        checkpoint_blocks(model)
    placed = loop.model(micro=micro, model=model)
    placed.make_optimizer = make_optimizer
    counter = Counter()
    counter.track_external(placed.model)
    with AsOnCuda(), counter:
        loop.fit(placed, tiny.loader(SAMPLES, data), precision=precision, max_steps=3)
    assert predicted.moment == "forward and backward"
    assert predicted.tensor_bytes + beside == pytest.approx(counter.peak_bytes(), rel=0.05)


def test_the_copy_has_the_types_of_the_precision_and_its_ties():
    model = Wide()
    model.tied = model.last
    model.last.weight.requires_grad = False
    given = task({"x": torch.zeros(2, tiny.WIDTH), "y": torch.zeros(2, 1)}, precision="bf16-true")
    with AsOnCuda(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
        copied = Rehearsal(model, given, 1, fake)._model
        assert copied.tied.weight is copied.last.weight
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.bfloat16}
    assert [each.requires_grad for each in copied.parameters()] == [each.requires_grad for each in model.parameters()]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
