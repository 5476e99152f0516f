"""`cavs train`, `cavs predict`, `cavs evaluate`: classification, tagging, language models, translation, one file per task.

Read the files in this order: `config` (all settings), `task` (the interface of a task) and one of `task_classify`, `task_lm`,
`task_nmt` and `task_tag`; `data` with `text`, `tagged`, `sentences` and `parallel` (from files to graphs); `batches`; `model`
with `softmax`, `tagger` with `chunks`, and `translator`; `optimiser`, `step` (one jitted step), `loop` and `checkpoint`. `run`
puts them together, `report` prints progress and results, `predict` labels new files, `evaluate` scores a checkpoint on a file
(`scores` for labels, `bleu` for translations), and `compiled` sets up compilation and its cache.
"""

from cavs._train.compiled import (
    allocate_when_needed as allocate_when_needed,
    compile_quickly as compile_quickly,
    keep_compiled as keep_compiled,
)
from cavs._train.config import TrainError as TrainError
from cavs._train.devices import connected as connected
from cavs._train.evaluate import evaluate as evaluate
from cavs._train.memory_error import OUT_OF_MEMORY as OUT_OF_MEMORY, out_of_memory as out_of_memory
from cavs._train.predict import predict as predict
from cavs._train.run import train as train
from cavs._train.samples import guess_task as guess_task, read_samples as read_samples
from cavs._train.settings import with_settings as with_settings
from cavs._train.task import Asked as Asked
