"""Reads damaged bytes of every file that the project reads: a few in `make test`, for long in `make fuzz`.

Start reading at `readers.READERS`. `damage` makes damaged bytes, `child` reads them in a process with limits, `corpus/`
keeps inputs that once went wrong.
"""
