"""Shows and writes what a study found: terminal, csv, md and html, with columns by the kind of study.

Start at `files`; `columns` has the figures, the templates have the texts. `step_table` shows a tune.
"""
