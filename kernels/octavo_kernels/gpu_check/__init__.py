"""How fast the kernels are on the GPU of this machine, against what it could do."""
