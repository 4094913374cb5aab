"""The work of the commands ``info``, ``bench`` and ``tune``. The command line is in ipcreduce/cli.py."""
