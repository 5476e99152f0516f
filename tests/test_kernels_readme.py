"""kernels/README.md: its programs print the texts below them, and the files and names that it mentions exist."""

import contextlib
import io
import re
from pathlib import Path

import jax
import pytest

from tests.markdown import blocks

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "kernels" / "README.md").read_text()


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="other equations of the same derivatives")
def test_a_level_is_printed_as_the_page_shows() -> None:
    """The golden texts of a level, forward and backward, and of its layouts, narrow and wide."""
    names: dict[str, object] = {}
    for program, text in re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", TEXT, re.DOTALL):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(program, names)
        assert printed.getvalue() == text
    assert len(blocks("python", TEXT)) == len(blocks("text", TEXT)) == 5


def test_files_of_the_page_exist() -> None:
    named = re.findall(r"`((?:[\w]+/)*[\w]+\.py)(?::|`)", TEXT)
    assert len(named) > 20
    folders = (ROOT / "kernels", ROOT / "cavs", ROOT)
    assert not [name for name in named if not any((folder / name).exists() for folder in folders)]


def test_names_of_the_page_exist() -> None:
    table = TEXT[TEXT.index("## Where do I change") : TEXT.index("## Without a GPU")]
    named = {
        part
        for name in re.findall(r"`([A-Za-z_]+(?:\.[A-Za-z_]+)?)`", re.sub(r"`\w+\.py`", "", table))
        for part in name.split(".")
    }
    code = "\n".join(path.read_text() for folder in ("kernels", "cavs/_engines") for path in (ROOT / folder).rglob("*.py"))
    assert len(named) > 20
    assert not [name for name in named - {"cavs", "kernels"} if not re.search(rf"\b{name}\b", code)]
