from torch import nn

from wellfed.train.memory.checkpointing import blocks_to_gather


class Model(nn.Module):
    """Three large blocks, a small one, and a head that is the table of words again."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 400)
        self.blocks = nn.ModuleList(nn.Linear(400, size, bias=False) for size in (400, 300, 500))
        self.small = nn.ModuleList([nn.Linear(2, 2)])
        self.heads = nn.ModuleList([nn.Linear(400, 1000, bias=False)])
        self.heads[0].weight = self.words.weight


def test_blocks_are_gathered_each_by_itself_unless_small_or_shared() -> None:
    model = Model()
    assert blocks_to_gather(model) == list(model.blocks)
