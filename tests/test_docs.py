"""The documentation: its programs run, its names, commands and links exist, and it tells every public name."""

import importlib.util
import inspect
import re

import pytest

import cavs
from tests.markdown import ROOT, blocks, printed, start

DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
TEXT = {name: path.read_text() for name, path in PAGES.items()}
# Pages with programs. A page that imports a package which is not installed, such as flax, does not run.
PROGRAMS = [
    name
    for name in PAGES
    if (code := "\n".join(blocks("(?:python|pycon)", TEXT[name])))
    and all(importlib.util.find_spec(module) for module in re.findall(r"^(?:import|from) (\w+)", code, re.M))
]
NAMESPACES = [
    "cavs",
    "cavs.io",
    "cavs.data",
    "cavs.debug",
    "cavs.interop",
    "cavs.memory",
    "cavs.recipes",
    "cavs.vertex_programs",
]


def public_names(namespace: str) -> list[str]:
    """The full names of the functions and classes of a namespace."""
    module = importlib.import_module(namespace)
    names = [name for name in dir(module) if name[0] != "_" and callable(getattr(module, name))]
    return [f"{namespace}.{name}" for name in names]


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """The programs of all pages, running one page after another while the other tests of this file do their work."""
    with start(tmp_path_factory.mktemp("docs"), [PAGES[name] for name in PROGRAMS]) as process:
        yield process
        process.kill()


def test_all_programs_run(process) -> None:
    out = printed(process)
    assert len(re.findall(r"^page: .* failed: 0 ", out, re.MULTILINE)) == len(PROGRAMS), out


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_the_reference_has_every_public_name(namespace: str) -> None:
    reference = re.findall(r"^::: (\S+)", "\n".join(text for name, text in TEXT.items() if name.startswith("api/")), re.M)
    assert len(reference) == len(set(reference))
    objects = {id(_find(name)) for name in reference}
    assert not [name for name in public_names(namespace) if id(_find(name)) not in objects]


def _find(name: str) -> object:
    found: object = cavs
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_names_that_a_page_tells_exist(page: str) -> None:
    text = re.sub(r"```py .*?```", "", TEXT[page], flags=re.DOTALL)
    told = set(re.findall(r"(?<![\w/.])cavs(?:\.[A-Za-z_]\w*)+(?![\w/])", text)) - {"cavs.md"}
    missing = []
    for name in told:
        try:
            _find(name)
        except AttributeError:
            missing.append(name)
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_paths_that_a_page_tells_exist(page: str) -> None:
    told = re.findall(r"`((?:bench|cavs|kernels|vertex_programs)/[\w/]+(?:\.\w+)?|kernels)`", TEXT[page])
    assert not [path for path in told if not (ROOT / path).exists()]


def test_commands_are_of_this_project(tmp_path, monkeypatch) -> None:
    """Every option in a shell block is one that the command takes."""
    from cavs import cli
    from cavs.recipes import _command

    monkeypatch.chdir(tmp_path)  # where no file exists
    monkeypatch.setattr(_command, "train", lambda *_: 0)
    commands = [
        line.split("#")[0].split() for text in TEXT.values() for block in blocks("sh", text) for line in block.splitlines()
    ]
    for command in [c for c in commands if c and c[0] == "cavs"]:
        cli.main(command[1:])  # an unknown option would end the program


def test_the_site_has_every_page() -> None:
    navigation = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {name for name in PAGES} <= navigation


def test_pictures_are_drawn_by_the_script() -> None:
    """Each picture of a page is in docs/images."""
    for name, text in TEXT.items():
        for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
            assert (PAGES[name].parent / path).exists(), (name, path)


def test_documented_members_have_docstrings() -> None:
    """mkdocstrings leaves out what has no docstring, so nothing public may lack one."""
    assert not [name for space in NAMESPACES for name in public_names(space) if not inspect.getdoc(_find(name))]
