"""Holds one file a rule: ``check(evidence)`` gives a Finding where the evidence is there, else None.

The name of the file is the id of its finding. `wellfed.explain.diagnosis.judge` asks them all.
"""
