"""Shows and writes a leaderboard: terminal, csv, md and html, with columns by the kind of study.

Start at `files`; `columns` has the figures, the templates have the words.
"""
