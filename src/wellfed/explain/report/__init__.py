"""Writes what people read of a run: lines for the screen, ``report.md``, ``report.html``, and two runs side by side.

Knows records and what the diagnosis makes of them; changes neither. Start from `run_lines`.
"""
