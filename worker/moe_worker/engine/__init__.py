"""One generation engine per rank: sequence, blocks and scheduler without torch; kv, batch, runner with it."""
