"""Tools that find a mistake: the per-vertex interpreter, a comparison with it, a search for NaN, and pictures of graphs."""

from cavs._debug.compare import Comparison as Comparison, Difference as Difference, compare as compare
from cavs._debug.find_nan import NanReport as NanReport, find_nan as find_nan
from cavs._debug.inspect import inspect as inspect
from cavs._debug.interpret import interpret as interpret
from cavs._graphs.draw import Drawing as Drawing, draw as draw
