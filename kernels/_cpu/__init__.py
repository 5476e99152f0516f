"""C++ on a CPU: the scheduler, and engine `native`, which runs all levels of a batch; and what compiles and finds them."""
