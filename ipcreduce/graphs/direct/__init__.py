"""Direct kernels in graphs: off by default."""
