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
    slow("Module", "Weighted", ()),
    ("Module", "Held", ()),
    slow("Module", "Held", ("trainer.checkpoint_minutes=0.00001", "trainer.checkpoint_every_steps=1000")),
    slow("Module", "StreamOfFixed", ()),
    slow("OfPairs", "Combined", ()),
    slow("EndsEpochs", "Data", ()),
    ("Manual", "Data", ()),
    slow("Module", "Data", ("memory.accumulate=2",)),
    slow("Module", "datasets", (*FED, "memory.accumulate=2")),
    slow("Module", "Data", ("trainer.lightning.reload_dataloaders_every_n_epochs=1",)),
]


@pytest.mark.parametrize(("model", "data", "typed"), ROWS)
def test_it_goes_on_with_the_batch_that_comes_next(
    tmp_path: Path, model: str, data: str, typed: tuple[str, ...]
) -> None:
    """From within the first epoch, and from between two."""
    names = (f"{HERE}.{model}", f"{HERE}.{data}")
    every = ("trainer.max_epochs=3", "trainer.checkpoint_every_steps=1", "trainer.keep_last=99", *typed)
    whole = guest(tmp_path / "whole", *names, *every).fit()
    places = {path: torch.load(path)["position"] for path in whole.last.parent.glob("last*.ckpt")}
    files = sorted(places, key=lambda path: places[path]["batches"])
    within = next(path for path in files if places[path]["batch"] > 0)
    # The hook that ends an epoch may come after its last step was saved.
    between = [path for path in files if places[path]["batch"] == 0 and places[path]["epoch"] == 1][:1]
    for place in (within, *between):
        resumed = guest(tmp_path / place.stem, *names, *every).fit(place)
        done = places[place]["batches"] * (len(whole.module.seen) // places[files[-1]]["batches"])
        assert resumed.module.seen == whole.module.seen[done:]
        for name, value in whole.weights.items():
            assert torch.equal(resumed.weights[name], value), name
        assert resumed.books.record.steps == whole.books.record.steps


def test_a_file_of_the_users_own_checkpoint_has_the_place_after_its_step(tmp_path: Path) -> None:
    names, folder = (f"{HERE}.Module", f"{HERE}.Data", "trainer.max_epochs=2"), tmp_path / "own"
    own = ("_target_=lightning.pytorch.callbacks.ModelCheckpoint", f"dirpath={folder}", "every_n_train_steps=4")
    whole = guest(tmp_path / "whole", *names, *(f"+callbacks.own.{one}" for one in (*own, "save_top_k=-1"))).fit()
    (file,) = (path for path in folder.iterdir() if torch.load(path)["global_step"] == 4)
    resumed = guest(tmp_path / "resumed", *names).fit(file)
    assert resumed.module.seen == whole.module.seen[4:]
    assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())
