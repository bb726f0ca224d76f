"""Forecasts the next steps of one or many series from a window of their past.

Covers time series: calendars, gaps, scaling, splits by time. It is independent of Lightning, devices, workers and
logging. Start from `workloads.forecast.model` and `workloads.forecast.data.datasets`; README.md is the card.
"""
