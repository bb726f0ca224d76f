"""Recommends films from metadata of user and film, and from the films watched before.

The data are implicit feedback: ratings as (user, film) pairs, and metadata as text. The whole catalogue is ranked. Uses
no Lightning, devices, workers or logging. Start from `workloads.recsys.model.TwoTowerRecommender` and
`workloads.recsys.data.datasets`; README.md is the card.
"""
