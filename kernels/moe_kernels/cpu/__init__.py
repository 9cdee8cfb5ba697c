"""The operations compiled for this processor by numba."""
