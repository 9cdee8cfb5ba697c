"""The public API: OpenAI's routes, from a request's bytes to the last byte of its answer."""
