import lightning.pytorch as pl
import pytest
import torch

from tests.kit import tiny
from wellfed.observe.timing.step_clock import StepClock
from wellfed.train.lightning import trainer as lit
from wellfed.train.lightning.callbacks.clock import TimedLoader
from wellfed.train.lightning.prefetch import prefetched

CPU = torch.device("cpu")


class Own(pl.LightningModule):
    """A user's module that moves its batches itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(tiny.WIDTH, 1)
        self.moved = 0

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.moved += 1
        return {"x": batch["x"] + 1, "y": batch["y"]}

    def training_step(self, batch, batch_idx):
        assert batch["x"].mean() < 2  # moved once, not twice
        return (self.layer(batch["x"]) - batch["y"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(module, ahead, tmp_path, unwrap=False):
    with prefetched(tiny.loader(), module, CPU, ahead) as loader:
        timed = TimedLoader(loader, StepClock(), unwrap=unwrap)
        lit.fit(lit.make_trainer(tiny.options(max_steps=7), [], tmp_path), module, timed, None, None)
    return tiny.weights(module)


def test_training_is_the_same_bit_for_bit(tmp_path):
    expected = train(tiny.module(dropout=0.2), 0, tmp_path)
    for ahead in (1, 3):
        assert torch.equal(train(tiny.module(dropout=0.2), ahead, tmp_path), expected)


def test_a_users_own_transfer_is_used_once_a_batch_and_given_back(tmp_path):
    module = Own()
    train(module, 2, tmp_path, unwrap=True)
    assert 7 <= module.moved <= 7 + 2 + 1
    assert "transfer_batch_to_device" not in vars(module)


def test_an_error_in_training_stops_what_reads_ahead(tmp_path):
    class Breaks(tiny.TinyModel):
        def loss(self, batch):
            raise KeyError("mine")

    import threading

    with pytest.raises(KeyError, match="mine"):
        train(tiny.module(model=Breaks()), 2, tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name == "wellfed-device-prefetch"]
