"""Lines of code that a user writes for one model, counted in this repository (Cavs, section 5.3, "Others").

    python -m bench lines

The count covers the functions and classes named below, without docstrings, comments and blank lines. For Cavs this is the
vertex function. For a peer it is the code beyond what its models share. In Cavs the scheduler and the engine do the work of
that shared code (levels and live rows of the hand-levelled peers, for example). A new kind of graph may need more of it in a
peer.
"""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Each model's functions by system, as file:function, in vertex_programs/ (cavs) or bench/peers/. `declarations` says what a
# name that begins with "." or ":" means.
DECLARATIONS = """
Tree-LSTM: cavs binary_tree_lstm:BinaryTreeLSTM.__call__
  torch_levelled torch_levelled:TorchLevelled._tree_lstm ._tree_lstm_leaf ._tree_lstm_inner
  torch_manual torch_manual:TorchManual._tree_lstm
  dynet dynet_autobatch:DynetAutobatch._tree_lstm
  dgl dgl_topo:_TreeLSTM
  jax_scan jax_scan:_tree_lstm
Tree-FC: cavs tree_fc:TreeFC.__call__
  torch_levelled torch_levelled:TorchLevelled._tree_fc ._tree_fc_inner
  torch_manual torch_manual:TorchManual._tree_fc
  dynet dynet_autobatch:DynetAutobatch._tree_fc
  jax_scan jax_scan:_tree_fc
Var-LSTM: cavs lstm:LSTM.__call__ :lstm_state
  torch_levelled torch_levelled:TorchLevelled._lstm
  torch_manual torch_manual:TorchManual._lstm
  dynet dynet_autobatch:DynetAutobatch._lstm ._chain
  jax_scan jax_scan:_lstm
child-sum Tree-LSTM: cavs child_sum_tree_lstm:ChildSumTreeLSTM.__call__
  torch_edges torch_edges:_states
  dgl dgl_topo:_TreeLSTM
TD-RNN: cavs tree_fc:TreeFC.__call__
  torch_applications torch_vpps:td_rnn
  dynet dynet_autobatch:DynetAutobatch._td_rnn
TD-LSTM: cavs td_lstm:TDLSTM.__call__
  torch_applications torch_vpps:td_lstm
  dynet dynet_autobatch:DynetAutobatch._td_lstm
RvNN: cavs rvnn:RvNN.leaf .inner
  torch_applications torch_vpps:rvnn
  dynet dynet_autobatch:DynetAutobatch._rvnn
BiLSTM tagger: cavs bilstm_tagger:BiLSTMTagger.run bilstm:BiLSTM.run
  torch_packed_bilstm torch_bilstm:TorchBiLSTM._states torch_bilstm:BiLSTM._packed
  torch_loop_bilstm torch_bilstm:TorchBiLSTM._states torch_bilstm:BiLSTM._loop
  dynet dynet_autobatch:DynetAutobatch._bilstm ._tag
spelling of its rare words: cavs char_bilstm_tagger:CharBiLSTMTagger.vectors .run
  torch_packed_bilstm torch_bilstm:TorchBiLSTM._spelled
  torch_loop_bilstm torch_bilstm:TorchBiLSTM._spelled
  dynet dynet_autobatch:DynetAutobatch._char_bilstm ._spelling
encoder-decoder: cavs encoder_decoder:EncoderDecoder.encoder .__call__ .run
  torch_applications torch_attention:encoder_decoder :_encode :_lstm
lattice LSTM: cavs lattice_lstm:LatticeLSTM.word .character
  torch_applications torch_lattice:lattice_lstm
DAGNN: cavs dagnn:DAGNN.__call__ gru:gru_state
  torch_applications torch_dagnn:dagnn :_gru :_live_rows
"""


def declarations() -> dict[str, dict[str, list[str]]]:
    """Returns model -> system -> its functions."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in DECLARATIONS.strip().splitlines():
        model, _, rest = line.rpartition(": ")
        system, *names = rest.split()
        of = found.setdefault(model, {}) if model else next(reversed(found.values()))
        full: list[str] = []
        for name in names:  # ".f" is a method of the class before, ":f" a function of the file before
            before = full[-1].rpartition(name[0])[0] if name[0] in ".:" else ""
            full.append(before + name)
        of[system] = full
    return found


def count() -> dict[str, dict[str, int]]:
    """Returns the number of lines of each model in each system."""
    return {
        model: {name: sum(_lines(name, f) for f in functions) for name, functions in systems.items()}
        for model, systems in declarations().items()
    }


def _lines(system: str, function: str) -> int:
    module, name = function.split(":")
    source = (ROOT / ("vertex_programs" if system == "cavs" else "bench/peers") / f"{module}.py").read_text()
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        node = next(n for n in node.body if getattr(n, "name", None) == part)  # type: ignore[attr-defined]
    docstrings = {
        line
        for n in ast.walk(node)
        if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(n) is not None
        for line in range(n.body[0].lineno, (n.body[0].end_lineno or 0) + 1)
    }
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {line for t in tokens if t.type not in skipped for line in range(t.start[0], t.end[0] + 1)}
    return len([n for n in code - docstrings if node.lineno <= n <= node.end_lineno])  # type: ignore[attr-defined]
