"""The model and the data of this project; a toy stands here until yours does.

Must not know Lightning, devices, workers or logging. Start from `workloads.blank.model.Regressor` and
`workloads.blank.data.datasets`; README.md is the card.
"""
