"""A server that clients take for OpenAI's: one decoder behind a queue, over HTTP."""
