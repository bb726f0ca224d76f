"""Runs the command ``wellfed``: reads the words after it, and prints what each subcommand answers.

One file a subcommand in ``commands/``; the work of a run or a study is in other wings. Start from `main.COMMANDS`.
"""
