"""The matrix: every kind of call (kinds.py), on every backend (table.py), in every way (ways.py)."""
