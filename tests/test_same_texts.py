"""Equal programs are lowered to equal texts in every process. Otherwise JAX's compilation cache would never find them."""

import os
import subprocess
import sys

import pytest

from tests.markdown import ROOT


@pytest.mark.slow
def test_equal_programs_have_equal_texts_in_every_process() -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "tests.same_texts_script"]
    processes = [
        subprocess.Popen(command, env=environment | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True)
        for seed in ("1", "2")
    ]
    one, other = (process.communicate(timeout=300)[0].splitlines() for process in processes)
    assert [process.returncode for process in processes] == [0, 0] and len(one) >= 3
    assert one == other
