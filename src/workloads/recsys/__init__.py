"""Recommends films from the user's metadata, the film's metadata, and the films watched before.

Knows implicit feedback: ratings as (user, film) pairs, metadata as text, ranking of a whole catalogue. Must not know
Lightning, devices, workers or logging. Start from `workloads.recsys.model.TwoTowerRecommender` and
`workloads.recsys.data.datasets`; README.md is the card.
"""
