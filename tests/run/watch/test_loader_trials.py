"""Trials of a script's DataLoader that can't be read as the script reads it."""

import io

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tests.kit.evidence_of import evidence
from wellfed.run.screen import Terminal
from wellfed.run.watch.loader_trials import show_trials


class InWorkers(Dataset):
    """Can't be read in the training process again, as if a file was closed."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        if get_worker_info() is None:
            raise OSError("closed")
        return torch.zeros(1)


def test_an_own_setting_that_fails_is_compared_by_the_step_of_the_script():
    out = io.StringIO()
    found = evidence(wait_ms=90.0, compute_ms=10.0, host_ms=0.0)
    show_trials(Terminal(file=out, width=160), DataLoader(InWorkers(), batch_size=4), found)
    assert "OSError: closed" in out.getvalue()
    assert " Best: DataLoader(num_workers=" in out.getvalue()
    assert "about 10 times as fast, predicted" in out.getvalue()
