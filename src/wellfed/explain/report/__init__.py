"""Writes what people read of a run: ``report.html``, ``report.md``, the last screen, and runs side by side.

Knows records and what the diagnosis makes of them; changes neither. Start from `run_lines`.
"""
