"""The start-up of the ranks: MPI or another group, the exchange of their first data, connections between hosts."""
