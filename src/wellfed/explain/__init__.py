"""Explains a finished run: findings with their overrides (``diagnosis``), pages, pictures and screens (``report``).

Needs no GPU, no torch and no Lightning. ``curves`` finds swings in curves of GPU utilisation, also of other programs.
Start from `diagnosis/run_rules.py` and `report/write.py`.
"""
