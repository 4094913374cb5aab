"""Interrupts at chosen places: see :mod:`tests.interrupts.__main__`."""
