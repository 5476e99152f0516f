"""The library of engine `native`: C++ that runs all levels of a batch on a CPU, `build.py` and `library.py`, which finds it."""
