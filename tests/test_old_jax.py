"""A Hopper GPU with a JAX that is too old for its kernels: one warning, and a cure."""

import sys
import warnings

import jax
import pytest

from cavs._engines import choose
from cavs.kernels import H200, Target, persistent


@pytest.mark.parametrize(
    "python, cure",
    [((3, 11), "this is Python 3.11: install cavs in an environment of Python 3.12"), ((3, 12), "pip install --upgrade 'jax")],
)
def test_a_hopper_gpu_with_an_old_jax_gets_one_warning_with_the_cure(python, cure, monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    monkeypatch.setattr(sys, "version_info", python)
    choose._warn_once_if_held_back.cache_clear()
    with pytest.warns(UserWarning, match="this GPU could run the fast engine, persistent") as caught:
        choose._warn_once_if_held_back(H200)
        choose._warn_once_if_held_back(H200)
    assert len(caught) == 1 and cure in str(caught[0].message)
    assert cure in (persistent.unsupported(H200) or "")  # what `cavs.explain(F)` shows
    choose._warn_once_if_held_back.cache_clear()


@pytest.mark.parametrize(
    "target, version", [(Target("cpu"), "0.10.2"), (Target("gpu", "NVIDIA A100", "8.0"), "0.10.2"), (H200, "0.11.2")]
)
def test_others_are_not_warned(target, version, monkeypatch):
    monkeypatch.setattr(jax, "__version__", version)
    choose._warn_once_if_held_back.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose._warn_once_if_held_back(target)
    choose._warn_once_if_held_back.cache_clear()
