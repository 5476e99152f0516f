"""The check that an argument is graphs, for functions that would fail with an error of their inside otherwise."""

from cavs._graphs.graphs import Graphs


def check_graphs(graphs: object, function: str) -> None:
    """Raises `TypeError` if the argument `graphs` of `function` is something else."""
    if not isinstance(graphs, Graphs):
        raise TypeError(
            f"{function}: graphs: got a {type(graphs).__name__}; expected cavs.Graphs. Write, for instance, "
            "cavs.read_trees(path)[:64]."
        )
