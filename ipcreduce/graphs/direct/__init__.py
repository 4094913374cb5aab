"""Direct kernels in graphs, which write into the peers' outputs: off by default. The entry is ``DirectGraphs``."""
