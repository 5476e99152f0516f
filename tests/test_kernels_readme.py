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
