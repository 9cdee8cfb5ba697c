"""The operations in plain torch: the oracle, on any device."""
