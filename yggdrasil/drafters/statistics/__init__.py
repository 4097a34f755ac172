"""N-gram statistics: counts of which tokens follow a context in the text or in a static table, as a drafter."""
