"""A Hopper GPU with a JAX that is too old for its kernels: one warning, and a cure."""

import sys
import types
import warnings

import jax
import pytest

from cavs._engines import choose
from cavs.kernels import persistent


@pytest.mark.parametrize(
    "python, cure",
    [((3, 11), "this is Python 3.11: install cavs in an environment of Python 3.12"), ((3, 12), "pip install --upgrade 'jax")],
)
def test_a_hopper_gpu_with_an_old_jax_gets_one_warning_with_the_cure(python, cure, monkeypatch):
    device = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    monkeypatch.setattr(sys, "version_info", python)
    choose._warn_once_if_held_back.cache_clear()
    with pytest.warns(UserWarning, match="this GPU could run the fast engine, persistent") as caught:
        choose._warn_once_if_held_back()
        choose._warn_once_if_held_back()
    assert len(caught) == 1 and cure in str(caught[0].message)
    assert cure in (persistent.supported() or "")  # what `cavs.explain(F)` shows
    choose._warn_once_if_held_back.cache_clear()


@pytest.mark.parametrize(
    "platform, capability, version", [("cpu", "", "0.10.2"), ("gpu", "8.0", "0.10.2"), ("gpu", "9.0", "0.11.2")]
)
def test_others_are_not_warned(platform, capability, version, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(platform=platform, compute_capability=capability)])
    monkeypatch.setattr(jax, "__version__", version)
    choose._warn_once_if_held_back.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose._warn_once_if_held_back()
    choose._warn_once_if_held_back.cache_clear()
