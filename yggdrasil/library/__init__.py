"""Compiles, finds and loads the native library, whose sources are in ``native``. Imports no torch."""
