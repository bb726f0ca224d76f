"""Classifies rows, as a start: put a model and data of your own in the place of `model` and `data`.

`python -m wellfed add workload NAME` copies this folder, which no code imports; README.md is the card.
"""
