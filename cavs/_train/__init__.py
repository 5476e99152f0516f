"""Training from the command line (`cavs train`, `cavs predict`): a program over files of graphs, or a language model over text.

Read in this order: `config` (what can be asked), `data` and `text` (files to graphs), `batches`, `model` with `softmax`,
`optimiser`, `step` (one jitted step), `loop`, `checkpoint`; `run` puts them together, `report` shows, `predict` labels,
`compiled` keeps compiled code.
"""

from cavs._train.compiled import keep_compiled as keep_compiled
from cavs._train.config import TrainError as TrainError
from cavs._train.predict import predict as predict
from cavs._train.run import train as train
