"""Conversions from and to other libraries: networkx, PyTorch, Flax and Equinox cells, and exported programs."""

from cavs._interop.cells import from_cell as from_cell
from cavs._interop.edge_index import from_edge_index as from_edge_index
from cavs._interop.export_server import export_server as export_server
from cavs._interop.exported import Exported as Exported, export_forward as export_forward, load_forward as load_forward
from cavs._interop.networkx_graphs import from_networkx as from_networkx, to_networkx as to_networkx
from cavs._interop.torch_rnn import params_from_torch as params_from_torch, params_to_torch as params_to_torch
