"""Speculation settings for other engines, chosen by our objective from their costs and the plan's acceptance."""
