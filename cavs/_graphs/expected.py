"""The check that an argument is graphs, for functions that would fail with an error of their inside otherwise."""

from cavs._graphs.graphs import Graphs


def check_graphs(graphs: object, call: str) -> None:
    """Raises `TypeError` if the argument `graphs` is something else. `call` says how to write it: "save_npz(graphs, path)"."""
    if not isinstance(graphs, Graphs):
        raise TypeError(
            f"{call.partition('(')[0]}: graphs: got a {type(graphs).__name__}; expected cavs.Graphs. Write {call}, with graphs "
            "such as cavs.read_trees(path)."
        )
