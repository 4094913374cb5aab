"""How the ranks find each other: MPI or another group, the exchange at start-up, and connections between hosts."""
