import pytest
import torch

from wellfed.train.step.totals import Totals


@pytest.mark.parametrize("share", [1, 0.5])
def test_sums_do_not_share_memory_with_what_is_overwritten(share: float) -> None:
    totals, output = Totals(), torch.ones(())
    totals.add("loss", output, share, is_overwritten=True)
    totals.commit()
    output.fill_(7.0)  # as the next run of the graph does
    assert totals.take() == {"loss": share}


def test_a_step_that_is_dropped_counts_nothing() -> None:
    totals = Totals()
    totals.add("loss", torch.tensor(3.0), 1)
    totals.drop()
    totals.add("loss", torch.tensor(2.0), 0.25)
    totals.add("loss", torch.tensor(6.0), 0.75)
    assert totals.pending("loss") == 5
    totals.commit()
    assert (totals.count, totals.take(), totals.take()) == (1, {"loss": 5.0}, {})


@pytest.mark.parametrize("num_steps", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("saved_after", [None, 0, 40])
def test_means_do_not_depend_on_when_sums_are_saved(num_steps: int, saved_after: int | None) -> None:
    torch.manual_seed(0)
    totals, values = Totals(), torch.rand(num_steps) * 100
    for number, value in enumerate(values):
        totals.add("loss", value, 1)
        totals.commit()
        if number == saved_after:
            state, totals = totals.state_dict(), Totals()
            totals.load_state_dict(state)
    assert totals.count == num_steps
    assert totals.take() == {"loss": float(values.double().mean())}


def test_a_buffer_that_changes_counts_as_it_was_in_each_step():
    totals, buffer = Totals(), torch.zeros(())
    for number in range(10):
        buffer.fill_(number)
        totals.add("buffer", buffer, 1)
        totals.add("one", torch.full([1] if number % 2 else [], 2.0), 1)
        totals.commit()
    assert totals.take() == {"buffer": 4.5, "one": 2.0}


def test_a_sum_of_a_checkpoint_is_read_with_those_of_the_device() -> None:
    """A metric of some steps alone has no value on the device yet when training goes on."""
    totals, devices = Totals(), []
    totals.load_state_dict({"sums": {"rare": torch.ones((), dtype=torch.float64)}, "count": 1})
    totals.add("loss", torch.ones((), device="meta"), 1)
    totals.commit()

    def reduce(sums: torch.Tensor) -> torch.Tensor:
        devices.append(sums.device.type)
        return torch.zeros(len(sums))

    assert set(totals.state_dict(reduce)["sums"]) == {"rare", "loss"}
    assert devices == ["meta"]
