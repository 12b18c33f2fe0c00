"""The numerical reference: what is right, in FP64 on the CPU, with NumPy only."""
