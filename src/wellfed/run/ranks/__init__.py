"""Coordinates the ranks of one run through torch.distributed's store.

Start with `coordination`, which a run's stages call. It uses:

- `following`: how other ranks get the run that rank 0 has composed.
- `exchange`: objects from rank to rank, and how each rank has ended.
- `store`: torch's store, opened.

`rank_figures` brings the figures of all ranks to rank 0 by it, while they train.
"""
