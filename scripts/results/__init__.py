"""Benchmark results as rows, and the tables of the documents that are made from them. Imports no torch."""
