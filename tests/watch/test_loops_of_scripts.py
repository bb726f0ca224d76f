"""``wellfed watch`` on loops of many shapes: their steps, samples, validations and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.few import slow
from tests.watch.watching import findings_of, rows_of, watched

HEAD = """
import itertools, time, torch
from torch.utils.data import DataLoader, TensorDataset
class Slow(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.01)
        return super().forward(x)
def loader(number=80, **given): return DataLoader(TensorDataset(torch.randn(number, 4)), **{"batch_size": 8, **given})
def train(batches):
    for (x,) in batches:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
@torch.no_grad()
def evaluate(batches):
    for (x,) in batches:
        model(x)
model = Slow(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
LOOPS = {
    "accumulated": """
for i, (x,) in enumerate(loader(240, batch_size=4)):
    model(x).mean().backward()
    if i % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
""",
    "read ahead, as transformers' Trainer does": """
batches = iter(loader(240, batch_size=4))
while read := list(itertools.islice(batches, 3)):
    for (x,) in read:
        model(x).mean().backward()
    optimizer.step()
""",
    "many steps with one batch": """
(x,) = next(iter(loader()))
for _ in range(20):
    model(x).mean().backward()
    optimizer.step()
""",
    "rollouts": """
for (rollout,) in loader(160, batch_size=32):
    train(DataLoader(TensorDataset(rollout), batch_size=8))
""",
    "folds": """
for fold in range(2):
    one = loader()
    train(one)
    evaluate(loader())
""",
    "closures": """
for (x,) in loader(160):
    def closure():
        optimizer.zero_grad()
        loss = model(x).mean()
        loss.backward()
        return loss
    optimizer.step(closure)
""",
    "two optimizers": """
critic = Slow(4, 1)
of_critic = torch.optim.SGD(critic.parameters(), lr=0.01)
for (x,) in loader(160):
    critic(x).mean().backward()
    of_critic.step()
    model(x).mean().backward()
    optimizer.step()
""",
    "sequences as [time, batch]": """
for x in DataLoader(range(160), batch_size=8, collate_fn=lambda found: torch.zeros(50, len(found), 4)):
    model(x).mean().backward()
    optimizer.step()
""",
}


@pytest.mark.parametrize("name", ["accumulated", *(slow(name) for name in [*LOOPS][1:])])
def test_steps_and_samples(name: str, tmp_path: Path) -> None:
    record = watched(HEAD + LOOPS[name], tmp_path)
    of_step = {("12", "4", "3")} if name.startswith(("accum", "read ahead")) else {("8", "8", "1")}
    rows = rows_of(tmp_path)
    assert [int(row["step"]) for row in rows] == list(range(1, 21))
    assert {(row["samples"], row["micro_batch"], row["num_micro"]) for row in rows[1:]} == of_step
    assert record.config["workload"]["effective_batch_size"] == int(min(of_step)[0])
    assert all(row["backward_ms"] for row in rows[5:-1])
    if "accumulated" in name or "closures" in name:
        assert all(float(row["forward_ms"]) >= 10 for row in rows[5:-1])


@pytest.mark.slow
def test_validations_within_an_epoch_are_told_by_their_steps(tmp_path: Path) -> None:
    loop = (
        "for number, batch in enumerate(loader(320)):\n    train([batch])\n    if number % 5 == 4: evaluate(loader())"
    )
    record = watched(f"{HEAD}{loop}\n", tmp_path)
    (finding,) = [one for one in record.findings if one["id"] == "frequent_validation"]
    assert record.plan["trainer.validate_every_steps"]["value"] == 5
    assert finding["change"][0].startswith("validation every ")


@pytest.mark.slow
def test_a_batch_of_validation_within_training(tmp_path: Path) -> None:
    """Its time is no wait of the training."""
    record = watched(
        HEAD
        + """
class Late(TensorDataset):
    def __getitems__(self, indices):
        time.sleep(0.05)
        return [self[index] for index in indices]
val = DataLoader(Late(torch.randn(64, 4)), batch_size=64)
for i, batch in enumerate(loader(480)):
    train([batch])
    if i % 3 == 2:
        evaluate([next(iter(val))])
""",
        tmp_path,
    )
    assert {row["samples"] for row in rows_of(tmp_path)} == {"8"}
    assert record.steps == 60
    assert record.time is not None
    assert record.time["wait_frac"] < 0.3
    assert record.phases["validate"]["times"] == 20
    assert record.phases["validate"]["total_s"] > 18 * 0.05  # the first is recognised after its time


@pytest.mark.slow
@pytest.mark.parametrize(
    "loop",
    [
        "for (x,) in loader(320):\n    y = frozen(x)\n    train([(y,)])",
        "for batch in loader(320):\n    train([batch])\n    averaged([batch])",
        "for number, batch in enumerate(loader(320)):\n    train([batch])\n    if number % 20 == 0: averaged(loader())",
    ],
    ids=["frozen encoder", "teacher", "validation of averaged weights"],
)
def test_a_second_model_is_no_callback(loop: str, tmp_path: Path) -> None:
    more = """
import copy
frozen = copy.deepcopy(model).requires_grad_(False)
frozen.forward = lambda x: (time.sleep(0.01), x)[1]
@torch.no_grad()
def averaged(batches):
    for (x,) in batches: frozen(x)
"""
    record = watched(HEAD + more + loop, tmp_path)
    assert record.steps == 40
    assert ("slow_callbacks" in findings_of(record)) == ("averaged([" in loop)


@pytest.mark.slow
def test_files_saved_one_after_another_are_one_checkpoint(tmp_path: Path) -> None:
    """As transformers writes a model, its optimizer, the schedule and the state of random numbers."""
    save = "    if number % 5 == 4:\n        for file in 'abc': torch.save(model.state_dict(), file)"
    loop = f"for number, batch in enumerate(loader(320)):\n    train([batch])\n{save}\n"
    record = watched(HEAD + loop, tmp_path)
    assert record.phases["checkpoint"]["times"] == 8
    assert [event["kind"] for event in record.events].count("checkpoint") == 8
    assert record.plan["trainer.checkpoint_every_steps"]["value"] == 5
