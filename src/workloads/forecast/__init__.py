"""Forecasts the next steps of one or many series from a window of their past.

Knows time series: calendars, gaps, scaling, splits by time. Must not know Lightning, devices, workers or logging. Start
from `workloads.forecast.model` and `workloads.forecast.data.datasets`; README.md is the card.
"""
