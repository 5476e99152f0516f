"""Cavs: dynamic neural nets in JAX. One static vertex function, any graph."""

from cavs._debug.compare import Comparison as Comparison, Difference as Difference, compare as compare
from cavs._debug.find_nan import NanReport as NanReport, find_nan as find_nan
from cavs._debug.interpret import interpret as interpret
from cavs._feed.host_memory import keep_host_memory as keep_host_memory
from cavs._feed.prefetch import prefetch as prefetch
from cavs._feed.stacked import stacked as stacked
from cavs._feed.together import Together as Together, together as together
from cavs._function.vertex import Optimizations as Optimizations, Vertex as Vertex, VertexFunction as VertexFunction
from cavs._graphs.converters import (
    from_edges as from_edges,
    from_lengths as from_lengths,
    from_networkx as from_networkx,
    from_parents as from_parents,
    to_networkx as to_networkx,
)
from cavs._graphs.graphs import Graphs as Graphs
from cavs._interop.cells import from_cell as from_cell
from cavs._interop.edge_index import from_edge_index as from_edge_index
from cavs._interop.exported import Exported as Exported, export_forward as export_forward, load_forward as load_forward
from cavs._interop.torch_rnn import params_from_torch as params_from_torch, params_to_torch as params_to_torch
from cavs._interop.weights import load_params as load_params, save_params as save_params
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
from cavs._run.jit import jit as jit
from cavs._run.readout import readout as readout
from cavs._run.run import run as run
from cavs._schedule.schedule import Schedule as Schedule
from cavs._schedule.scheduler import schedule as schedule, schedules as schedules

# Last: the programs are written with the public names above.
from cavs import vertex_programs as vertex_programs  # noqa: E402, I001

__version__ = "0.1.0"
