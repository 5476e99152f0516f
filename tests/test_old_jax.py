"""What is wrong with JAX itself: one warning, and a cure."""

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


@pytest.mark.parametrize(
    "flags, target, warned",
    [
        ("--xla_gpu_deterministic_ops=true", H200, "--xla_gpu_deterministic_ops"),
        ("--a=1 --xla_gpu_exclude_nondeterministic_ops", H200, "--xla_gpu_exclude_nondeterministic_ops"),
        (
            "--xla_gpu_deterministic_ops=true --xla_gpu_enable_scatter_determinism_expander=false",
            H200,
            "--xla_gpu_deterministic",
        ),
        ("--xla_gpu_deterministic_ops=true --xla_disable_hlo_passes=dce,scatter_determinism_expander", H200, ""),
        ("--xla_gpu_deterministic_ops=false", H200, ""),
        ("--xla_gpu_deterministic_ops=true", Target("cpu"), ""),
        ("", H200, ""),
    ],
)
def test_deterministic_scatters_get_one_warning_with_the_cure(flags, target, warned, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    choose._warn_once_of_wrong_scatters.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        choose._warn_once_of_wrong_scatters(target)
        choose._warn_once_of_wrong_scatters(target)
    texts = [str(w.message) for w in caught]
    assert len(texts) == bool(warned)
    assert not warned or (warned in texts[0] and "--xla_disable_hlo_passes=scatter_determinism_expander" in texts[0])
    choose._warn_once_of_wrong_scatters.cache_clear()
