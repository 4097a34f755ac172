"""N-gram statistics as drafter: counts of the tokens that follow a context, in the text or in a static table."""
