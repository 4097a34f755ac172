"""Heads of Medusa."""
