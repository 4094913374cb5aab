"""Models of the protocols, in Promela, and the runner that searches them: ``python -m tests.models``."""
