"""`cavs train` and `cavs predict`: classification, tagging, language models and translation, one file per task.

Read the files in this order: `config` (all settings), `task` (the interface of a task) and one of `task_classify`, `task_lm`,
`task_nmt` and `task_tag`; `data` with `text`, `tagged`, `sentences` and `parallel` (from files to graphs); `batches`; `model`
with `softmax`, `tagger` with `chunks`, and `translator`; `optimiser`, `step` (one jitted step), `loop` and `checkpoint`. `run`
puts them together, `report` prints progress and results, `predict` labels new files, and `compiled` sets up JAX's compilation
cache.
"""

from cavs._train.compiled import keep_compiled as keep_compiled
from cavs._train.config import TrainError as TrainError
from cavs._train.predict import predict as predict
from cavs._train.run import train as train
