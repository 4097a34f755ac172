"""Training a drafter for a target: on text that the target writes itself, from what it computes while reading it."""
