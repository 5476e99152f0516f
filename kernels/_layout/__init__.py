"""Where a launch lies on the chip: groups, tiles, weights in the order in which they are read, and measured layouts."""
