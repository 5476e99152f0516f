"""Lines of code that a user writes for one model, counted in this repository's own files (Cavs section 5.3, "Others").

    python -m bench lines

Counted: the lines of code of the functions and classes named below, without docstrings, comments and blank lines. Ours is the
vertex function; a peer's is what it needs beyond the code that its models share.
"""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# model -> system -> (file, functions whose bodies declare the model)
DECLARATIONS = {
    "Tree-LSTM": {
        "cavs": ("vertex_programs/binary_tree_lstm.py", ("BinaryTreeLSTM.__call__",)),
        "torch_levelled": ("bench/peers/torch_levelled.py", ("TorchLevelled._tree_lstm", "_carry")),
        "torch_manual": ("bench/peers/torch_manual.py", ("TorchManual._tree_lstm",)),
        "dynet": ("bench/peers/dynet_autobatch.py", ("DynetAutobatch._tree_lstm",)),
        "dgl": ("bench/peers/dgl_topo.py", ("_TreeLSTM",)),
        "jax_scan": ("bench/peers/jax_scan.py", ("_tree_lstm", "_sweep")),
    },
    "Tree-FC": {
        "cavs": ("vertex_programs/tree_fc.py", ("TreeFC.__call__",)),
        "torch_levelled": ("bench/peers/torch_levelled.py", ("TorchLevelled._tree_fc", "_carry")),
        "torch_manual": ("bench/peers/torch_manual.py", ("TorchManual._tree_fc",)),
        "dynet": ("bench/peers/dynet_autobatch.py", ("DynetAutobatch._tree_fc",)),
        "jax_scan": ("bench/peers/jax_scan.py", ("_tree_fc", "_sweep")),
    },
    "Var-LSTM": {
        "cavs": ("vertex_programs/lstm.py", ("LSTM.__call__",)),
        "torch_levelled": ("bench/peers/torch_levelled.py", ("TorchLevelled._lstm",)),
        "torch_manual": ("bench/peers/torch_manual.py", ("TorchManual._lstm",)),
        "dynet": ("bench/peers/dynet_autobatch.py", ("DynetAutobatch._lstm",)),
        "jax_scan": ("bench/peers/jax_scan.py", ("_lstm",)),
    },
}


def count() -> dict[str, dict[str, int]]:
    """Model -> system -> lines."""
    return {
        model: {name: sum(_lines(ROOT / path, f) for f in functions) for name, (path, functions) in systems.items()}
        for model, systems in DECLARATIONS.items()
    }


def _lines(path: Path, name: str) -> int:
    source = path.read_text()
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
