"""Heads on the target's states: drafters that read what the target computed anyway."""
