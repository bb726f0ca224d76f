"""Recommends films from the user's metadata, the film's metadata, and the films watched before.

Covers implicit feedback: ratings as (user, film) pairs, metadata as text, ranking of a whole catalogue. It is
independent of Lightning, devices, workers and logging. README.md is the card.

Start from `workloads.recsys.model.TwoTowerRecommender`.
The data come from `workloads.recsys.data.datasets`.
"""
