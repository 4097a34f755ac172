"""The run-time policy, which chooses the tree that an iteration drafts and verifies. Imports no torch."""
