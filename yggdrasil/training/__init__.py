"""Training of a drafter for a target, on text that the target writes, from the target's hidden states on that text."""
