"""Tools that look at a run: the loop over vertices that defines it, comparisons with that, NaNs, and files of graphs."""
