"""Builds batches in the training process, in threads, in worker processes, or by torch's DataLoader.

Start from `batch_source.py`, which picks the backend. `batch_builder.py` builds one batch in all of them.
"""
