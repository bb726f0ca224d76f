"""Builds batches in the training process, in threads or in worker processes of torch's DataLoader.

Start from `batch_source.py`, which picks the backend. `batch_builder.py` builds one batch in all of them.
"""
