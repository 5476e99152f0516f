"""Builds the libraries in C++ when cavs is installed, if there is a compiler: the scheduler and engine `native`.

Without them, the scheduler in NumPy and engine `scan` run.
"""

import importlib.util
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "cavs/kernels/_cpu"


class Library(BuildHookInterface):
    """The hook of a wheel; an editable installation gets the files in place."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, and adds the files to the wheel, which then is for this kind of machine alone."""
        spec = importlib.util.spec_from_file_location("build_library", Path(self.root) / FOLDER / "build.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if version == "editable":
            module.build(module.SOURCE.parent)
            return
        self._folder = tempfile.TemporaryDirectory()
        files = module.build(Path(self._folder.name))
        if files:
            build_data["force_include"] |= {str(path): f"{FOLDER}/{path.name}" for path in files}
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the temporary folder."""
        if folder := getattr(self, "_folder", None):
            folder.cleanup()
