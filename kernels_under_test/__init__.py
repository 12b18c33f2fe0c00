"""What is judged: the bundled Triton kernels, the dense fallback, and the seeded faults."""
