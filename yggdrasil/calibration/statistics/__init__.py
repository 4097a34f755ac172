"""What is learned for n-gram statistics from the target's own text: the table, the scorer, and what they will give."""
