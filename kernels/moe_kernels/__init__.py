"""One contract per operation, with a plain torch implementation as oracle."""
