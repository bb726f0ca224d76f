"""Coordinates the ranks of one run through torch.distributed's store.

Start with `coordination`, which a run's stages call. It uses `exchange`, which passes plain objects from rank to rank
and reports how each rank has ended, over torch's store, which `store` opens.

`rank_figures` brings the figures of all ranks to rank 0 by it, while they train.
"""
