"""Says what a run's recorded figures mean. Pure: a record in, findings and text out.

Knows the record's keys; needs no GPU, no torch, no Lightning. Start from `report.to_markdown`.
"""
