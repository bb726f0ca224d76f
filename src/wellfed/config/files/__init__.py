"""Files of a configuration: option files, the page of knobs, the text of ``--help``, and where run folders lie."""
