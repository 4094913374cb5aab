"""Graphs whose kernels write straight into the peers' outputs: ``Communicator(algorithm="direct")``, off by default.

``DirectGraphs`` is the only entry, and a graph session the only importer. Whatever only direct needs lies in here.
"""
