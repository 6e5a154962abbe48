"""Attention for CPUs, compiled from C at first use.

Why C, and why this way:

* Paged K/V have to be read in place. Torch offers no operator that does; gathering the
  context first moves every byte three times.
* Plain C with the vector extensions that GCC and clang share and no instruction of assembly:
  one source for AVX2, AVX-512 and NEON, and a C compiler is all it takes. The one thing that they
  cannot say is AVX-512's product of bf16, for which vectors.h has an intrinsic and the
  same in plain C.
* A flat ABI called through ctypes, which releases the GIL. Without torch's headers it
  compiles in some two seconds and works with any torch; numba would bring LLVM along, a
  C++ extension a C++ compiler and a build for every version of torch.
* The parallel loops run on the OpenMP runtime that torch has loaded. A second one would
  bring its own threads, and both would spin on the same cores.

`build` compiles and caches, `library` loads, `ops` are the operators, `decoder` runs all
layers of a model in one call.
"""
