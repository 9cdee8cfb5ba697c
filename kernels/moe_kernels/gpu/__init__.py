"""The operations compiled for GPUs by Triton."""
