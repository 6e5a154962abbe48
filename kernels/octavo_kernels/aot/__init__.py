"""Every kernel, compiled for GPUs that are not here, and what its binary shows.

`python -m octavo_kernels.aot` compiles what the launchers would launch, reads
registers, spills, load widths and the inner loop from the machine code, and holds
them against the committed table.
"""
