"""``python -m ipcreduce bench``: all-reduce times beside other libraries and the machine's limit."""
