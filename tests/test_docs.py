"""The documentation, README and gallery: programs run, names, commands and links exist, and every public name is told."""

import importlib.util
import inspect
import re
import tomllib

import jax
import pytest

import cavs
from tests.markdown import ROOT, blocks, printed, start

DOCS = ROOT / "docs"
SITE = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
README, GALLERY = "README.md", "vertex_programs/README.md"
PAGES = SITE | {name: ROOT / name for name in (README, GALLERY)}
TEXT = {name: path.read_text() for name, path in PAGES.items()}
# Pages with programs. A page that imports a package which is not installed, such as flax, does not run; the gallery leaves out
# what needs one.
PROGRAMS = [
    name
    for name in PAGES
    if (code := "\n".join(blocks("(?:python|pycon)", TEXT[name])))
    and (
        name == GALLERY or all(importlib.util.find_spec(module) for module in re.findall(r"^(?:import|from) (\w+)", code, re.M))
    )
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
def out(tmp_path_factory) -> str:
    """What the programs of all pages print, one page after another."""
    with start(tmp_path_factory.mktemp("docs"), [PAGES[name] for name in PROGRAMS]) as process:
        try:
            return printed(process)
        finally:
            process.kill()


@pytest.mark.slow
def test_all_programs_run_and_all_errors_are_as_shown(out: str) -> None:
    assert len(re.findall(r"^page: .* failed: 0 ", out, re.MULTILINE)) == len(PROGRAMS), out


@pytest.mark.slow
def test_the_programs_of_readme_and_gallery_learn(out: str) -> None:
    before, _, after = out.partition(f"page: {PAGES[README]} ")
    losses = [float(x) for x in re.findall(r"epoch \d: loss ([\d.]+)", before.rpartition("page: ")[2])]
    assert len(losses) == 5 and losses[-1] < 0.8 * losses[0], out
    fits = [tuple(map(float, pair)) for pair in re.findall(r"loss ([\d.]+) -> ([\d.]+)", after)]
    assert len(fits) + after.count("left out:") == sum("\nfit(" in block for block in blocks("python", TEXT[GALLERY]))
    assert all(after < 0.1 * before for before, after in fits), fits


def test_graphs_without_a_label_have_no_loss_in_the_readme() -> None:
    forward, training = blocks("python", TEXT[README])
    names: dict = {}
    exec(forward.split("\n\n")[0] + "\n" + training.split("for epoch")[0], names)
    bare = cavs.read_trees(["( (0 a) (1 b))", "(1 c)"])
    loss = jax.jit(lambda params, sched: names["loss"](params, sched))
    both, labelled = (float(loss(names["params"], cavs.schedule(g, fields=("input_id", "label")))) for g in (bare, bare[1:]))
    assert both == pytest.approx(labelled, rel=1e-5)


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
    text = re.sub(r"\bvp(?=\.[A-Za-z_])", "cavs.vertex_programs", text)
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


def test_extras_and_scripts_are_of_this_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in TEXT.values():
        assert {*re.findall(r"--extra (\w+)", text)} <= {*project["optional-dependencies"]}
    shell = "\n".join(blocks("sh", TEXT[README]))
    commands = re.findall(r"^(?:pip install uv && )?uv run (?:--extra \w+ )?(\w+)", shell, re.MULTILINE)
    assert {*commands} == {*project["scripts"], "pytest"}


def test_the_site_has_every_page() -> None:
    navigation = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert SITE.keys() <= navigation


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    """Of the pages of the site pictures alone: mkdocs makes pages, and checks links."""
    links = re.findall(r"!\[[^\]]*\]\(([^)]+)\)" if page in SITE else r"\]\((?!http)([^)]+)\)", TEXT[page])
    assert not [path for path in links if not (PAGES[page].parent / path.partition("#")[0]).exists()]


def test_documented_members_have_docstrings() -> None:
    """mkdocstrings leaves out what has no docstring, so nothing public may lack one."""
    assert not [name for space in NAMESPACES for name in public_names(space) if not inspect.getdoc(_find(name))]
