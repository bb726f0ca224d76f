"""Renders HTML pages that are one file each, and pictures within them: no network, no script, light and dark, paper.

Charts are SVG within HTML (`chart`). Needs Jinja2 and numpy, and imports nothing of runs or studies.
Start from `html_page`.
"""
