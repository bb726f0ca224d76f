import torch

from wellfed.train.memory.thrash import Thrash


def test_two_steps_in_a_row_with_retries() -> None:
    counts = iter([5, 5, 6, 6, 7, 9, 9, 10, 11, 12, 13])
    thrash = Thrash(torch.device("cpu"), lambda: next(counts))
    found = [thrash.after_step() for _ in range(10)]
    assert found == [False, False, False, False, True, False, False, True, False, True]
