"""Classifies rows of numbers: a starting point to replace with your own `model` and `data`.

`python -m wellfed add workload NAME` copies this folder, which no code imports; README.md is the card.
"""
