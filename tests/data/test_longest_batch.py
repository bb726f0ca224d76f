import torch
from torch.nn.utils.rnn import pad_sequence

from wellfed.data.backend_benchmark import _FEW, longest_batch
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader


class Texts:
    """Sample ``late`` has 50 tokens, all others have 5."""

    def __init__(self, late, num=400):
        self.late, self.num = late, num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return torch.full((50 if index == self.late else 5,), index)


def padded(samples):
    ids = pad_sequence(samples, batch_first=True)
    return {"ids": ids, "mask": ids > 0}


def found_in(dataset):
    made = train_loader(dataset, LoaderSettings(), batch_size=4, seed=1, collate=padded, shuffle=False)
    return longest_batch(iter(made))


def test_the_longest_of_the_first_batches_is_found():
    batch = found_in(Texts(late=20))
    assert batch["ids"].shape == (4, 50)
    assert 20 in batch["ids"]
    assert found_in(Texts(late=4 * _FEW))["ids"].shape == (4, 5), "no more batches are looked at"


def test_few_batches_are_enough():
    assert found_in(Texts(late=100, num=8))["ids"].shape == (4, 5)
