"""Reads and writes files of a configuration: option files, the page of knobs, run folders. Start from `option_file`."""
