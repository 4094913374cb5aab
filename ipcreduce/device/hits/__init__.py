"""Repeated calls, a module for each kind: each looks its calls up in the launch cache, and describes their forms.

For speed they read the attributes of arrays by their own libraries, not by ``ipcreduce.arrays``.
"""
