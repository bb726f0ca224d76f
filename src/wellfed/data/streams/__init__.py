"""Reads datasets in order: several readers share one, and its batches are built from their samples.

Start from `stream_loader.py`, which yields the batches. `stream.py` describes the dataset; `stream_builder.py` reads
it.
"""
