"""Cavs: dynamic neural nets in JAX. One static vertex function, any graph."""

from cavs._debug.interpret import interpret as interpret
from cavs._function.vertex import Optimizations as Optimizations, Vertex as Vertex, VertexFunction as VertexFunction
from cavs._graphs.converters import from_edges as from_edges, from_lengths as from_lengths, from_parents as from_parents
from cavs._graphs.graphs import Graphs as Graphs
from cavs._readers import read as read, read_trees as read_trees
from cavs._run.concurrent_jit import concurrent_jit as concurrent_jit
from cavs._run.readout import readout as readout
from cavs._run.run import run as run
from cavs._schedule.schedule import Schedule as Schedule
from cavs._schedule.scheduler import schedule as schedule

from cavs import data as data, debug as debug, interop as interop, io as io

# Last: the programs are written with the public names above.
from cavs import vertex_programs as vertex_programs  # noqa: E402, I001

__version__ = "0.1.0"
