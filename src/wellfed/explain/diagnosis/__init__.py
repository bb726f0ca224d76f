"""Diagnoses a run from its recorded figures: where time was lost, why, and which overrides win it back.

Pure: takes a record and its tables, returns findings and text, and needs no GPU, torch or Lightning. Start from
`run_rules.run_rules`. `evidence.Evidence` is its input, and ``rules/`` has a function per finding.
"""
