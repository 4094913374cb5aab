"""The life of a call: its number, comparison, faults, and how the ranks go on. It needs no CUDA."""
