"""Backends that build batches: in place, in threads, in worker processes, or by torch's DataLoader.

Start from `batch_source.py`, which chooses among them.
"""
