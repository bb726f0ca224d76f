"""The command ``wellfed``: what was typed after it, and what each subcommand prints.

One file a subcommand in ``commands/``; how a run or a study does its work is below. Start from `main.COMMANDS`.
"""
