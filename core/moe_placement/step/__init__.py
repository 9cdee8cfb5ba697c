"""From the placement in force to balance in few moves."""
