"""Builds the n-gram table and scorer from the target's own text, and predicts their speed."""
