"""How fast the library is beside the plain way of doing the same thing: `python -m benchmarks`."""
