"""Training loops: batches (`Loader`), the training step (`step`) and logging (`Log`).

The folder also holds the sample files that `cavs train` reads by default.
"""

from cavs._feed.batches import Batches as Batches
from cavs._feed.loader import Loader as Loader
from cavs._feed.settings import Sample as Sample
from cavs._step.host_memory import keep_host_memory as keep_host_memory
from cavs._step.log import Log as Log, json_lines as json_lines, tensorboard as tensorboard
from cavs._step.rows import rows as rows
from cavs._step.step import Step as Step, step as step
from cavs._step.total import mean as mean, total as total
