"""The kernels in Triton, one op a file: a checked launcher and what it launches."""
