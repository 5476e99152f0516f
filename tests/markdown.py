"""Pages of Markdown whose programs run: their blocks, and a process that executes them as a reader would."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

# In an interpreter without the settings of the tests. Blocks of a page run in its order and share a namespace, pages do not.
RUN = r"""
import doctest, importlib.util, pathlib, re, sys, time, warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "Error reading persistent compilation cache")  # another process is still writing it
for path in sys.argv[1:]:
    text, begin = pathlib.Path(path).read_text(), time.monotonic()
    names = {"__name__": "__main__"}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for found in re.finditer(r"```(python|pycon)\n(.*?)```", text, re.DOTALL):
        language, code = found.groups()
        line = text[: found.start(2)].count("\n")
        if language == "pycon":
            examples = doctest.DocTestParser().get_doctest(code, {}, path, path, line)
            examples.globs = names
            runner.run(examples, clear_globs=False)
        elif "import equinox" in code and importlib.util.find_spec("equinox") is None:  # of the extra [interop]
            print("left out: equinox is not installed")
        else:
            exec(compile("\n" * line + code, path, "exec"), names)
    seconds = round(time.monotonic() - begin, 1)
    print("page:", path, "examples:", runner.tries, "failed:", runner.failures, "seconds:", seconds, flush=True)
"""


def blocks(language: str, text: str) -> list[str]:
    """The fenced blocks of a language. ```py blocks show another library's code and are not run."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def start(folder: Path, paths: Sequence[Path]) -> subprocess.Popen[str]:
    """Starts a process that runs the pages in `folder`, with a link to the package."""
    (folder / "cavs").symlink_to(ROOT / "cavs")
    # JAX adds lines about its own frames to a message, unless it shows them.
    env = os.environ | {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu", "JAX_TRACEBACK_FILTERING": "off"}
    command, pipe = [sys.executable, "-c", RUN, *map(str, paths)], subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)


def printed(process: subprocess.Popen[str]) -> str:
    """Waits for the pages to finish, and returns what they printed."""
    out, error = process.communicate(timeout=600)
    assert not process.returncode, f"{out}\n{error}"
    return out.strip()
