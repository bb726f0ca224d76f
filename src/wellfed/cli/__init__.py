"""Runs the command ``wellfed``: finds the subcommand and prints its result.

Each subcommand is a file in ``commands/``; other wings do its work. Start from `main.COMMANDS`.
"""
