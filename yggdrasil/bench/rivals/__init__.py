"""Trees of other systems, as rules that choose which candidates to attach; numpy only, one rule a file."""
