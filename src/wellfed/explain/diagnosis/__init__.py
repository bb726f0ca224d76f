"""Diagnoses a run from its recorded figures: where time was lost, why, and which overrides win it back.

Pure: a record and its tables in, findings and text out; needs no GPU, no torch, no Lightning. Start from `judge.judge`:
`evidence.Evidence` is what it is given, ``rules/`` has one file for each thing it may find.
"""
