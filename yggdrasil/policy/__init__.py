"""The run-time policy: which tree an iteration drafts and verifies, by tokens per millisecond. Imports no torch."""
