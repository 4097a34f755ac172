"""Recurrent layers under a tree: their states, the operators over them, and copies of states at places of a text."""
