"""Keeps the ranks of one run together, by way of torch.distributed's store.

Start with `other_ranks`, which a run's stages call. Below it:

- `following`: how other ranks get the run that rank 0 has composed.
- `exchange`: objects from rank to rank.
- `ends`: how each rank has ended, and which one is gone.
- `store`: torch's store, opened.
"""
