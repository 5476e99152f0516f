"""Cavs: dynamic neural nets in JAX. One static vertex function, any graph."""

from cavs._converters import (
    from_edges as from_edges,
    from_lengths as from_lengths,
    from_networkx as from_networkx,
    from_parents as from_parents,
    to_networkx as to_networkx,
)
from cavs._graphs import Graphs as Graphs
from cavs._host_memory import keep_host_memory as keep_host_memory
from cavs._interpret import interpret as interpret
from cavs._prefetch import prefetch as prefetch
from cavs._readers import (
    FormatError as FormatError,
    load_npz as load_npz,
    read as read,
    read_conllu as read_conllu,
    read_edges as read_edges,
    read_netlist as read_netlist,
    read_trees as read_trees,
    save_npz as save_npz,
    write_edges as write_edges,
)
from cavs._run import run as run
from cavs._schedule import Schedule as Schedule
from cavs._scheduler import schedule as schedule
from cavs._vertex import Optimizations as Optimizations, Vertex as Vertex, VertexFunction as VertexFunction

# Last: the programs are written with the public names above.
from cavs import vertex_programs as vertex_programs  # noqa: E402, I001

__version__ = "0.1.0"
