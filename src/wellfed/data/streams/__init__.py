"""Datasets that are read in order: how several readers share one, and how its batches are built.

Start from `stream_loader.py`, which yields the batches. `stream.py` describes the dataset; `stream_builder.py` reads
it.
"""
