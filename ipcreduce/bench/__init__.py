"""``python -m ipcreduce bench``: times of an all-reduce beside the peers that are installed and the machine's limit."""
