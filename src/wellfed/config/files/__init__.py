"""Files of a configuration: option files, the page of knobs, and where run folders lie; start from `option_file`."""
