"""The training step: one dispatch of several steps on one or more devices, its sums, rows of tables, log and host memory."""
