"""A resumed guest sees the very batches that the unbroken one does, and learns the same."""

from pathlib import Path

import pytest
import torch

from tests.kit.few import slow
from tests.kit.guests import guest

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning", "ignore::UserWarning")
HERE = "tests.train.guest.brought"
FED = ("workload.effective_batch_size=4",)
ROWS = [
    ("Module", "Data", ()),
    ("Plateau", "datasets", FED),
    slow("Plateau", "Data", ("trainer.max_steps=15",)),
    slow("Module", "Workers", ()),
    ("Module", "Weighted", ()),
    ("Module", "Held", ()),
    slow("Module", "Held", ("trainer.checkpoint_minutes=0.00001", "trainer.checkpoint_every_steps=1000")),
    slow("Module", "StreamOfFixed", ()),
    ("OfPairs", "Combined", ()),
    slow("EndsEpochs", "Data", ()),
    ("Manual", "Data", ()),
    slow("Module", "Data", ("memory.accumulate=2",)),
    slow("Module", "datasets", (*FED, "memory.accumulate=2")),
    slow("Module", "Data", ("trainer.lightning.reload_dataloaders_every_n_epochs=1",)),
]


@pytest.mark.parametrize("at", ["within the first epoch", slow("within the second"), "between two"])
@pytest.mark.parametrize(("model", "data", "typed"), ROWS)
def test_it_goes_on_with_the_batch_that_comes_next(
    tmp_path: Path, model: str, data: str, typed: tuple[str, ...], at: str
) -> None:
    names = (f"{HERE}.{model}", f"{HERE}.{data}")
    every = ("trainer.max_epochs=3", "trainer.checkpoint_every_steps=1", "trainer.keep_last=99", *typed)
    whole = guest(tmp_path / "whole", *names, *every).fit()
    files = sorted(whole.last.parent.glob("last*.ckpt"), key=lambda path: torch.load(path)["global_step"])
    places = {path: torch.load(path)["position"] for path in files}
    wanted = [path for path, place in places.items() if (place["batch"] == 0) == (at == "between two")]
    epoch = 0 if at == "within the first epoch" else 1
    middle = next((path for path in wanted if places[path]["epoch"] == epoch), None)
    if middle is None:
        pytest.skip("the hook that ends the epoch comes after its last step was saved")
    resumed = guest(tmp_path / "resumed", *names, *every).fit(middle)
    done = places[middle]["batches"] * (len(whole.module.seen) // places[files[-1]]["batches"])
    assert resumed.module.seen == whole.module.seen[done:]
    for name, value in whole.weights.items():
        assert torch.equal(resumed.weights[name], value), name
    assert resumed.books.record.steps == whole.books.record.steps
