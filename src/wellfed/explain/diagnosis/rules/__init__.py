"""Holds one rule per file: ``check(evidence)`` returns a Finding if the evidence shows it, else None.

The file name is the id of its finding. `wellfed.explain.diagnosis.run_rules` runs all rules.
"""
