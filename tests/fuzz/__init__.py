"""Random programs over the whole interface, and random bytes: what nobody thought of.

``programs`` makes programs from seeds and shrinks those that fail. ``rank`` runs them on one rank and knows every
result beforehand; ``deaths`` ends a rank in one. ``job`` starts the ranks. ``messages`` has the bytes.
"""
