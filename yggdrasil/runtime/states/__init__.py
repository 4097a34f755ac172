"""Recurrent layers with token trees: states, operators, and copies of states at several positions of a text."""
