"""Forecasts the next steps of one or many series from a window of their past.

Uses no Lightning, devices, workers or logging. Start from `workloads.forecast.model` and
`workloads.forecast.data.datasets`; README.md is the card.
"""
