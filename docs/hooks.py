"""Hooks of mkdocs: pages that the site takes from elsewhere in the repository, and the tutorial, executed.

- The navigation gets the tutorial.
- The home page gets the table of results of the README.
- A Markdown file outside docs/ becomes a page (`TAKEN`). Its links to files that the site does not have become plain text.
- A tutorial is a Python file in jupytext's percent format, docs/tutorial/NAME.py. It is executed by a Jupyter kernel, and
  a cell that raises fails the build. The site gets the page NAME.md and the notebook NAME.ipynb.
"""

import os
import posixpath
import re
import tempfile
import time
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
TAKEN = {
    "gallery.md": "vertex_programs/README.md",
    "how/kernels.md": "kernels/README.md",
    "changelog.md": "CHANGELOG.md",
    "results.md": "bench/results/TABLES.md",
    "bench.md": "bench/README.md",
    "bench_notes.md": "bench/NOTES.md",
}
_TABLE = "<!-- docs/hooks.py puts the README's table here -->"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
log = get_plugin_logger("cavs")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the tutorial, and the page of the kernels if there is one, into the navigation."""
    names = [f"tutorial/{path.stem}.md" for path in sorted((ROOT / "docs" / "tutorial").glob("*.py"))]
    if names and config.nav:
        config.nav.insert(1, {"Tutorial": names})
    if (ROOT / TAKEN["how/kernels.md"]).exists():
        how = next(pages["How it works"] for pages in config.nav or [] if "How it works" in pages)
        how.append({"One level, followed through the kernels": "how/kernels.md"})
    return config


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Puts the README's table of results into the home page."""
    if page.file.src_uri != "index.md":
        return markdown
    table = (ROOT / "README.md").read_text().split("<!-- bench:begin -->")[1].split("<!-- bench:end -->")[0]
    return markdown.replace(_TABLE, table)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of `TAKEN` and of the tutorial."""
    for page, source in TAKEN.items():
        if (ROOT / source).exists():
            files.append(File.generated(config, page, content=_with_links(page, source)))
    for path in sorted((ROOT / "docs" / "tutorial").glob("*.py")):
        for name, content in execute(path).items():
            files.append(File.generated(config, f"tutorial/{name}", content=content))
    return files


def _with_links(page: str, source: str) -> str:
    """The text of `source`, with links to the other pages of the site, and the rest of its relative links as their words."""
    pages = {path: name for name, path in TAKEN.items()}

    def link(match: re.Match[str]) -> str:
        picture, words, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        name = path.removeprefix("docs/") if path.startswith("docs/") else pages.get(path)
        if name is None:
            return f"`{path}`" if picture else words
        return f"{picture}[{words}]({posixpath.relpath(name, posixpath.dirname(page) or '.')}{anchor or ''})"

    return _LINK.sub(link, (ROOT / source).read_text())


def execute(path: Path) -> dict[str, str | bytes]:
    """The files that a tutorial becomes, by name: its page, its notebook and its pictures.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell of the tutorial raised.
    """
    import jupytext
    import nbformat
    from nbclient import NotebookClient
    from nbconvert import MarkdownExporter
    from traitlets.config import Config

    begin = time.monotonic()
    notebook = jupytext.read(path)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as folder:
        config = Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/kernel"}})  # sockets in a folder, no ports
        place = {"metadata": {"path": str(ROOT)}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place, config=config).execute()
    resources = {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
    text, resources = MarkdownExporter().from_notebook_node(notebook, resources)
    download = f"\n\n[Download this page as a notebook]({path.stem}.ipynb)\n"
    log.info(f"executed {path.name} in {time.monotonic() - begin:.1f} s")
    return {f"{path.stem}.md": text + download, f"{path.stem}.ipynb": nbformat.writes(notebook), **resources["outputs"]}
