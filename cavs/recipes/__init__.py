"""A readable program for each task, on the public API alone, for `cavs train`, `tune`, `predict`, `evaluate` and `inspect`.

`trees`, `tagging`, `language_model`, `translation`, `regression` and `netlists` are one file each. A copy of such a file is a
program of its own: `python trees.py --data train.txt`. To change a model, change the copy.

A recipe is a subclass of [`cavs.recipes.Recipe`][]; [`cavs.recipes.main`][] makes it a command line. The loop is in
`cavs/recipes/_train.py`. Everything it is built from is in [`cavs.data`][]: `Loader`, `step`, `Keeper`, `evaluate`, `predict`.
"""

from cavs.recipes._data import (
    PROGRAM as PROGRAM,
    UNKNOWN as UNKNOWN,
    Data as Data,
    embedding_size as embedding_size,
    init_table as init_table,
    read_graphs as read_graphs,
    read_parts as read_parts,
    unseen_labels as unseen_labels,
    vocabulary as vocabulary,
)
from cavs.recipes._options import (
    Mistake as Mistake,
    RunOptions as RunOptions,
    check_file as check_file,
    flag as flag,
    option as option,
)
from cavs.recipes._recipe import Recipe as Recipe, optimizer as optimizer

from cavs.recipes._command import load_run as load_run, main as main  # isort: skip  (imports the names above)
