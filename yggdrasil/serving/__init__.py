"""OpenAI-compatible HTTP server: one decoder that serves queued requests one at a time."""
