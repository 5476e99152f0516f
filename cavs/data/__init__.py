"""Training loops: batches (`Loader`), the training step (`step`), logging (`Log`), checkpoints (`Keeper`), and scores.

The folder also holds the sample files that `cavs train` reads by default.
"""

from cavs._feed.batches import Batches as Batches
from cavs._feed.loader import Loader as Loader
from cavs._feed.settings import Sample as Sample
from cavs._fit.evaluate import evaluate as evaluate, predict as predict
from cavs._fit.keeper import Keeper as Keeper
from cavs._fit.kept import (
    Evaluated as Evaluated,
    KeeperError as KeeperError,
    new_folder as new_folder,
    read_run as read_run,
    restore_best as restore_best,
)
from cavs._fit.report import (
    draw_history as draw_history,
    json_of as json_of,
    print_scores as print_scores,
    shown as shown,
    write_figure as write_figure,
)
from cavs._fit.scores import (
    ConfusionMatrix as ConfusionMatrix,
    Errors as Errors,
    Found as Found,
    bleu as bleu,
    errors as errors,
    is_tagging as is_tagging,
    span_scores as span_scores,
)
from cavs._fit.softmax import softmax_loss as softmax_loss
from cavs._fit.texts import (
    graph_of as graph_of,
    label_names as label_names,
    named as named,
    phrases_of as phrases_of,
    sentences_of as sentences_of,
    vocabulary as vocabulary,
    with_labels as with_labels,
    words_of as words_of,
)
from cavs._graphs.files import write_text as write_text
from cavs._graphs.graphs import is_root as is_root
from cavs._readers import example as example
from cavs._run.tune import Tuned as Tuned
from cavs._step.compiled_step import Step as Step
from cavs._step.host_memory import (
    cache_compiled as cache_compiled,
    compile_quickly as compile_quickly,
    keep_host_memory as keep_host_memory,
)
from cavs._step.log import Log as Log, json_lines as json_lines, tensorboard as tensorboard
from cavs._step.rows import rows as rows
from cavs._step.step import StepInBudget as StepInBudget, step as step
from cavs._step.total import mean as mean, total as total
