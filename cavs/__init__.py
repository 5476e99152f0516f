"""Cavs: dynamic neural nets in JAX. One static vertex function, any graph."""

from cavs._graphs import Graphs as Graphs
from cavs._interpret import interpret as interpret
from cavs._run import run as run
from cavs._schedule import Schedule as Schedule, schedule as schedule
from cavs._vertex import Optimizations as Optimizations, Vertex as Vertex, VertexFunction as VertexFunction

__version__ = "0.1.0"
