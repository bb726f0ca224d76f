"""Renders HTML pages that are one file each, and pictures within them: no network, light and dark, paper.

Charts are SVG within HTML (`chart`). A script within the page makes them live; without it they stay still.
Needs Jinja2 and numpy, and imports nothing of runs or studies. Start from `html_page`.
"""
