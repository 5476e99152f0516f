"""Batches on their way to the device: schedules for many batches, prefetching, and packed transfers.

The folder also holds the sample files that `cavs train` reads by default.
"""

from cavs._feed.host_memory import keep_host_memory as keep_host_memory
from cavs._feed.packed import Packed as Packed, pack as pack
from cavs._feed.prefetch import prefetch as prefetch
from cavs._feed.schedules import schedules as schedules
from cavs._feed.stacked import stacked as stacked
