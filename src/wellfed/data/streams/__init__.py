"""Data sets that are read in order: how several readers share one, and the batches made of it.

Start from `stream_loader.py`.
"""
