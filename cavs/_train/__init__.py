"""Training from the command line (`cavs train`, `cavs predict`), a task a file: labels, tags, next words, translation.

Read in this order: `config` (what can be asked), `task` (what a task is) and one of `task_classify`, `task_lm`, `task_nmt`,
`task_tag`; `data` with `text`, `tagged`, `sentences`, `parallel` (files to graphs), `batches`, `model` with `softmax`,
`tagger` with `chunks`, `translator`, `optimiser`, `step` (one jitted step), `loop`, `checkpoint`; `run` puts them together,
`report` shows, `predict` labels, `compiled` keeps compiled code.
"""

from cavs._train.compiled import keep_compiled as keep_compiled
from cavs._train.config import TrainError as TrainError
from cavs._train.predict import predict as predict
from cavs._train.run import train as train
