"""Speculation settings for other engines, chosen by the objective value from the engine's costs and the acceptance."""
