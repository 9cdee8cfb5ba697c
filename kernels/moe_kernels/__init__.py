"""One contract per operation; `implementation` chooses who computes it."""
