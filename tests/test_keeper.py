"""`cavs.data.Keeper`: exact resuming from every place, the best of all evaluations, limits, damage, kills and locks."""

import errno
import json
import os
import signal
import stat
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs._fit import keeper as keepers
from cavs._graphs import files

GRAPHS = cavs.from_lengths([1 + i % 4 for i in range(22)], label=np.arange(53) % 3)


@cavs.data.step
def step(state: Any, sched: Any) -> Any:
    w, count = state
    w = w * 1.5 + jnp.where(sched.label >= 0, sched.label, 0).sum() / (1.0 + count)
    w = w / (1 + jnp.abs(w))
    return (w, count + 1), {"loss": w * 1.0, "count": jnp.float32(1)}


def start() -> Any:
    return jnp.float32(0.3), jnp.int32(0)


def score(sums: dict[str, float]) -> float:
    return -abs(sums["loss"] - 0.4)


def keep(folder: Path, **how: Any) -> cavs.data.Keeper:
    """A keeper of a loop over 6 batches in dispatches of two, or of one where the keeper needs them."""
    steps = 1 if how.get("every") or how.get("steps") else 2
    loader = cavs.data.Loader(GRAPHS, 4, seed=3, steps=steps, last="pad", shapes=1)
    return cavs.data.Keeper(folder, loader, score, **{"epochs": 3} | how)


def run(keeper: cavs.data.Keeper, stop_after: int = 10**9) -> Any:
    """Trains, and sends Ctrl-C after some dispatches. Returns the state."""
    with keeper:
        state = keeper.restore(start())
        for batches in keeper:
            state, sums = step(state, batches)
            stop_after -= 1
            if not stop_after:
                os.kill(os.getpid(), signal.SIGINT)
            if keeper.add(state, sums):
                keeper.score(state, {"loss": float(state[0]), "count": 1.0}, best=state[0])
        return state


def facts(keeper: cavs.data.Keeper) -> list[dict[str, Any]]:
    return [dict(record) | {"seconds": 0} for record in keeper.history]


@pytest.mark.parametrize("how", [{}, {"every": 4}, {"steps": 15}], ids=str)
def test_a_loop_that_is_stopped_anywhere_ends_bit_for_bit_like_one_that_is_not(tmp_path: Path, how: dict[str, int]) -> None:
    whole = keep(tmp_path / "whole", **how)
    want = run(whole)
    for after in range(1, 9):
        folder = tmp_path / f"stopped{after}"
        while True:
            keeper = keep(folder, **how)
            got = run(keeper, after)
            if keeper.stopped is None:
                break
            assert keeper.stopped == signal.SIGINT
        assert facts(keeper) == facts(whole)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_keeper_writes_the_files_that_it_names(tmp_path: Path) -> None:
    run(keep(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {".lock", *cavs.data.Keeper.FILES}


def test_the_history_has_the_sums_of_each_epoch_and_the_best_is_kept(tmp_path: Path) -> None:
    keeper = keep(tmp_path)
    run(keeper)
    assert [record["epoch"] for record in keeper.history] == [1, 2, 3]
    assert [record["train"]["count"] for record in keeper.history] == [6, 6, 6]
    best = max(keeper.history, key=lambda record: record["score"])
    assert keeper.best is best and float(cavs.data.restore_best(tmp_path, jnp.float32(0))) == best["held_out"]["loss"]
    assert json.loads((tmp_path / "history.json").read_text()) == keeper.history
    assert keep(tmp_path, facts={"a": [1]}).done is False
    run(keep(tmp_path, facts={"a": [1]}, epochs=4))
    assert cavs.data.read_run(tmp_path)["a"] == [1]


def test_facts_have_keys_that_are_numbers(tmp_path: Path) -> None:
    """JSON turns them into texts, whose order is another one. A run with such facts counted as damaged, and was not resumed."""
    names = {i: str(i) for i in range(12)}
    run(keep(tmp_path, epochs=1, facts={"names": names}))
    assert int(run(keep(tmp_path, epochs=2, facts={"names": names}))[1]) == 12
    assert cavs.data.read_run(tmp_path)["names"] == {str(i): name for i, name in names.items()}
    (tmp_path / ".mine.tmp").write_text("kept")
    run(keep(tmp_path, epochs=2))
    assert (tmp_path / ".mine.tmp").exists()


@pytest.mark.parametrize("name", ["best.npz", "history.json", "last.npz"])
def test_a_kill_at_the_end_loses_no_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    replace, left = os.replace, [2 if name == "best.npz" else 3]

    def killed(old: str, new: str) -> None:
        left[0] -= os.path.basename(new) == name
        if not left[0]:
            raise KeyboardInterrupt
        replace(old, new)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run(keep(tmp_path, epochs=3))
    monkeypatch.undo()
    keeper = keep(tmp_path, epochs=3)
    run(keeper)
    assert json.loads((tmp_path / "history.json").read_text()) == keeper.history and len(keeper.history) == 3


def test_a_loop_before_restore_is_refused(tmp_path: Path) -> None:
    """It trained and saved a run without an identifier, which no later one continued."""
    with keep(tmp_path) as keeper:
        with pytest.raises(RuntimeError, match=r"Keeper: got a loop before restore; .* Write state = keeper.restore\(state\)"):
            next(iter(keeper))
        keeper.restore(start())
        assert next(iter(keeper)) is not None


def test_limits_can_be_raised(tmp_path: Path) -> None:
    keeper = keep(tmp_path, steps=8)
    assert int(run(keeper)[1]) == 8 and keeper.done
    assert [record["epoch"] for record in keeper.history] == [1, pytest.approx(1 + 2 / 6)]
    longer = keep(tmp_path, steps=9)
    assert int(run(longer)[1]) == 9 and [record["step"] for record in longer.history] == [6, 8, 9]
    patient = keep(tmp_path / "patient", epochs=50, patience=2)
    run(patient)
    assert patient.best is not None and len(patient.history) == patient.best["epoch"] + 2 < 50


def test_a_score_that_is_no_number_is_the_lowest(tmp_path: Path) -> None:
    """As an accuracy of no labels. The first one would be the best for ever, as no number is above it."""
    scores = iter([np.nan, 0.1, np.nan, jnp.float32(0.3), 0.2])
    loader = cavs.data.Loader(GRAPHS, 4, seed=3, steps=2, last="pad", shapes=1)
    keeper = cavs.data.Keeper(tmp_path, loader, lambda sums: next(scores), epochs=5, patience=3)
    run(keeper)
    assert keeper.best is not None and keeper.best["epoch"] == 4 and len(keeper.history) == 5


def test_metrics_are_numbers_of_python_numpy_and_jax(tmp_path: Path) -> None:
    with keep(tmp_path) as keeper:
        state = keeper.restore(start())
        for _ in keeper:
            with pytest.raises(
                TypeError, match="Keeper.add: sums: got 0.5; expected a dict of real numbers. Write {'loss': values}"
            ):
                keeper.add(state, 0.5)  # type: ignore
            if keeper.add(state, {"loss": 0.5, "count": np.int64(1), "right": np.ones(2)}):
                keeper.score(state, {"loss": jnp.float32(0.25)})
        assert [record["train"] for record in keeper.history] == [{"loss": 1.5, "count": 3, "right": 6}] * 3
        assert json.loads((tmp_path / "history.json").read_text())[0]["held_out"] == {"loss": 0.25}


def test_metrics_of_some_steps_are_kept(tmp_path: Path) -> None:
    """A step without a metric set its sum back to nothing."""
    with keep(tmp_path, epochs=1) as keeper:
        state, sums = keeper.restore(start()), iter([{"a": 1.0, "b": 2.0}, {"a": 1.0}, {"a": 1.0, "b": 2.0}])
        for _ in keeper:
            if keeper.add(state, next(sums)):
                keeper.score(state, {"loss": 1.0})
        assert keeper.history[0]["train"] == {"a": 3, "b": 4}


def test_a_loader_that_was_read_before_begins_anew(tmp_path: Path) -> None:
    """`next(iter(loader))` used up the first of three epochs."""
    want = run(keep(tmp_path / "a"))
    keeper = keep(tmp_path / "b")
    next(iter(keeper._loader))
    assert all(map(np.array_equal, run(keeper), want)) and len(keeper.history) == 3


def test_the_last_evaluation_may_follow_the_loop(tmp_path: Path) -> None:
    with keep(tmp_path, epochs=1) as keeper:
        state = keeper.restore(start())
        for _ in keeper:
            keeper.add(state, {"loss": 1.0})
        keeper.score(state, {"loss": 0.5})
    assert [record["train"] for record in keeper.history] == [{"loss": 3.0}]
    assert (tmp_path / "last.npz").exists()


def test_an_epoch_without_an_evaluation_is_refused(tmp_path: Path) -> None:
    """It was not saved either, and its metrics were added to those of the next."""
    with (
        keep(tmp_path) as keeper,
        pytest.raises(
            RuntimeError, match=r"got no evaluation after add had returned True; .*Write if keeper.add\(state, sums\)"
        ),
    ):
        state = keeper.restore(start())
        for batches in keeper:
            state, sums = step(state, batches)
            keeper.add(state, sums)


def test_a_loop_that_was_left_at_the_end_of_an_epoch_goes_on_with_the_next(tmp_path: Path) -> None:
    with keep(tmp_path, epochs=2) as keeper:
        state = keeper.restore(start())
        for _ in range(2):
            for _ in keeper:
                if keeper.add(state, {"loss": 1.0}):
                    keeper.score(state, {"loss": 1.0})
                    break
    assert [(x["epoch"], x["train"]) for x in keeper.history] == [(1, {"loss": 3}), (2, {"loss": 3})]


@pytest.mark.parametrize("killed", [False, True])
def test_epochs_may_end_with_a_save_in_place_of_an_evaluation(tmp_path: Path, killed: bool) -> None:
    """The metrics of such an epoch were added to those of the next, whose seconds were not counted."""
    for _ in range(1 + killed):
        with keep(tmp_path, epochs=2) as keeper:
            state = keeper.restore(start())
            for _ in keeper:
                assert keeper._begun is not None
                if not keeper.add(state, {"loss": 1.0}):
                    continue
                if keeper._loader.epoch:
                    keeper.score(state, {"loss": 1.0})
                else:
                    keeper.save(state)
                    if killed:
                        break
    assert [(x["epoch"], x["train"]) for x in keeper.history] == [(2, {"loss": 3})]


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        (
            {"loader": cavs.data.Loader(GRAPHS, iter([[0]]))},
            TypeError,
            r"Keeper: loader: got one whose batches come from an iterator; .*Write Loader\(graphs, 64\)",
        ),
        ({"folder": 3}, TypeError, "Keeper: folder: got a int; expected the path of a folder"),
        ({"loader": GRAPHS}, TypeError, "Keeper: loader: got a Graphs; expected the cavs.data.Loader of the loop"),
        ({"score": 0.5}, TypeError, "Keeper: score: got a float; expected a function of 1 argument, .sums."),
        ({"epochs": "3"}, ValueError, "Keeper: epochs: got '3'; expected an int >= 0"),
        ({"patience": -1}, ValueError, "Keeper: patience: got -1; expected an int >= 0"),
        ({"files": "train.txt"}, TypeError, r"Keeper: files: got 'train.txt'; expected a list of paths. Write files=\[path\]"),
        ({"facts": ["a"]}, TypeError, "Keeper: facts: got a list; expected a dict"),
        ({"facts": {"run": 1}}, ValueError, "facts: got 'run'; expected other names than format, run, files, sha256"),
        ({"facts": {"a": np.ones(2)}}, TypeError, "facts: Object of type ndarray .* expected what JSON stores. Write float"),
        ({"steps": 3}, ValueError, r"Keeper: steps: got 3 with a loader of 6 .*expected .* Write Loader\(graphs, n, steps=1\)"),
        ({"every": 2}, ValueError, "Keeper: every: got 2 with a loader of 6 steps in a dispatch"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, how: dict[str, Any], error: type[Exception], text: str) -> None:
    given: dict[str, Any] = {"folder": tmp_path, "loader": cavs.data.Loader(GRAPHS, 4), "score": score, "epochs": 1}
    with pytest.raises(error, match=text):
        cavs.data.Keeper(**given | how)


def test_a_run_goes_on_in_the_next_epoch_with_other_batches_and_not_within_one(tmp_path: Path) -> None:
    run(keep(tmp_path, epochs=1))
    loader = cavs.data.Loader(GRAPHS, 4, seed=3, steps=1, last="pad", shapes=1)
    assert int(run(cavs.data.Keeper(tmp_path, loader, score, epochs=2))[1]) == 12
    run(keep(tmp_path, epochs=4), stop_after=1)
    other = cavs.data.Keeper(tmp_path, cavs.data.Loader(GRAPHS, 5, steps=2, last="pad"), score, epochs=4)
    with pytest.raises(cavs.data.KeeperError, match="the position of a loader with other batches"):
        run(other)


def test_a_loss_that_is_not_finite_ends_the_loop(tmp_path: Path) -> None:
    with (
        keep(tmp_path) as keeper,
        pytest.raises(FloatingPointError, match="loss: got nan in epoch 1, step 6; expected a finite"),
    ):
        state = keeper.restore(start())
        for batches in keeper:
            state, sums = step(state, batches)
            keeper.add(state, sums | {"loss": sums["loss"] * jnp.nan})


@pytest.mark.parametrize("at", [2, 5])
def test_a_loop_that_failed_goes_on_after_another_restore(tmp_path: Path, at: int) -> None:
    """Metrics of the failed steps were added to those of the steps after the restore."""
    whole = keep(tmp_path / "whole")
    want = run(whole)
    with keep(tmp_path / "again") as keeper:
        state, left = keeper.restore(start()), [at]
        for _ in range(2):
            try:
                for batches in keeper:
                    state, sums = step(state, batches)
                    left[0] -= 1
                    if keeper.add(state, sums | ({} if left[0] else {"loss": sums["loss"] * jnp.nan})):
                        keeper.score(state, {"loss": float(state[0]), "count": 1.0}, best=state[0])
            except FloatingPointError:
                state = keeper.restore(start())
        assert facts(keeper) == facts(whole) and all(map(np.array_equal, state, want))


def test_a_score_that_is_no_number_and_sums_that_are_no_dict_are_named(tmp_path: Path) -> None:
    loader = cavs.data.Loader(GRAPHS, 4)
    with cavs.data.Keeper(tmp_path, loader, lambda sums: None, epochs=1) as keeper:  # type: ignore
        state = keeper.restore(start())
        with pytest.raises(
            TypeError, match="Keeper.score: held_out: got a float; expected a dict of sums. Write cavs.data.eval"
        ):
            keeper.score(state, 0.5)  # type: ignore
        with pytest.raises(TypeError, match="Keeper: score: returned None; expected a real number"):
            keeper.score(state, {"loss": 1.0})


@pytest.mark.parametrize("metric", [1j, jnp.complex64(1), np.ones(1, complex), jax.random.key(0), np.array(["a"]), {"b": 1.0}])
def test_metrics_that_are_no_real_numbers_are_refused(tmp_path: Path, metric: Any) -> None:
    """Of a complex number, the real part was kept."""
    with keep(tmp_path) as keeper:
        state = keeper.restore(start())
        with pytest.raises(TypeError, match="(?s)Keeper.add: sums: got {'a': .*; expected a dict of real numbers"):
            keeper.add(state, {"a": metric})
        with pytest.raises(
            TypeError, match="(?s)Keeper.score: held_out: got a = .*; expected real numbers. Write cavs.data.ev"
        ):
            keeper.score(state, {"a": metric})
        with pytest.raises(TypeError, match="(?s)Keeper: score: returned .*; expected a real number"):
            keeper._score = lambda sums: metric
            keeper.score(state, {"loss": 1.0})


# ---- damage ----


def flipped(data: bytes, bit: int) -> bytes:
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


@pytest.mark.parametrize("name", ["model.json", "best.npz", "last.npz"])
def test_a_flipped_bit_is_detected_or_changes_nothing(tmp_path: Path, name: str) -> None:
    want = run(keep(tmp_path, epochs=2))
    best = float(cavs.data.restore_best(tmp_path, jnp.float32(0)))
    whole = (tmp_path / name).read_bytes()
    (tmp_path / "last-before.npz").unlink()
    known = cavs.data.read_run(tmp_path)
    for bit in np.random.default_rng(0).integers(0, 8 * len(whole), 300).tolist():
        (tmp_path / name).write_bytes(flipped(whole, bit))
        try:
            if name == "last.npz":
                with keep(tmp_path, epochs=2) as keeper:
                    got = keeper.restore(start())
                assert len(keeper.history) == 2 and all(map(np.array_equal, got, want))
            else:
                assert cavs.data.read_run(tmp_path) == known
                assert float(cavs.data.restore_best(tmp_path, jnp.float32(0))) == best
        except cavs.data.KeeperError as error:
            assert name in str(error) or "model.json" in str(error)


def test_a_damaged_save_is_replaced_by_the_one_before_it(tmp_path: Path) -> None:
    want = run(keep(tmp_path))
    for damage in (lambda path: path.write_bytes(path.read_bytes()[:-40]), Path.unlink):
        damage(tmp_path / "last.npz")
        keeper = keep(tmp_path)
        got = run(keeper)
        assert (damage is Path.unlink) or "Resuming from the save before it, last-before.npz" in keeper.notes[0]
        assert all(map(np.array_equal, got, want)) and len(keeper.history) == 3
        run(keep(tmp_path))
    (tmp_path / "last-before.npz").unlink()
    (tmp_path / "last.npz").write_bytes(b"PK")
    with pytest.raises(cavs.data.KeeperError, match="last.npz is damaged"):
        run(keep(tmp_path))


def test_files_of_another_run_and_of_other_states_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        run(keep(tmp_path / name, epochs=1))
    (tmp_path / "b" / "model.json").write_bytes((tmp_path / "a" / "model.json").read_bytes())
    with pytest.raises(cavs.data.KeeperError, match="last.npz belongs to another run than .*model.json"):
        run(keep(tmp_path / "b"))
    with pytest.raises(cavs.data.KeeperError, match=r"got float32\[\] at .*; expected float32\[2\]"):
        cavs.data.restore_best(tmp_path / "a", jnp.zeros(2, jnp.float32))
    with pytest.raises(cavs.data.KeeperError, match="there is no model.json in it"):
        cavs.data.read_run(tmp_path)


def test_the_best_may_have_leaves_of_any_dtype(tmp_path: Path) -> None:
    """And infinite ones: masks, the lowest loss so far, and whatever else a state has."""
    best = {"w": jnp.ones(2, jnp.bfloat16), "key": jax.random.key(3), "z": jnp.ones(2, jnp.complex64), "n": jnp.int8(1)}
    best["mask"] = jnp.array([0, -jnp.inf], jnp.float32)
    with keep(tmp_path) as keeper:
        keeper.restore(start())
        keeper.score(start(), {"loss": 0.4}, best=best)
        got = keeper.restore_best(best)
        assert all(a.dtype == got[name].dtype and (a == got[name]).all() for name, a in best.items())


def test_a_changed_file_of_the_data_and_other_versions_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").write_text("1")
    run(keep(tmp_path / "run", files=[str(tmp_path / "data")]))
    with monkeypatch.context() as patch:
        patch.setattr(keepers, "versions", lambda: {"jax": "0.1"})
        keeper = keep(tmp_path / "run", files=[str(tmp_path / "data")])
        run(keeper)
    assert "resumed with jax 0.1: results may not be bitwise equal" in keeper.notes[0]
    (tmp_path / "data").write_text("2")
    with pytest.raises(cavs.data.KeeperError, match="data has changed since .*run was trained on it; expected the same file"):
        run(keep(tmp_path / "run", files=[str(tmp_path / "data")]))


def test_a_changed_file_is_found_by_any_spelling_of_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").write_text("1")
    (tmp_path / "link").symlink_to("data")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    run(keep(tmp_path / "run", files=["data"]))
    (tmp_path / "data").write_text("2")
    for folder, path in ((".", "./data"), (".", tmp_path / "data"), (".", "link"), ("other", "../data")):
        monkeypatch.chdir(tmp_path / folder)
        with pytest.raises(cavs.data.KeeperError, match="has changed since .*run was trained on it; expected the same file"):
            run(keep(tmp_path / "run", files=[path]))
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    monkeypatch.chdir(moved)
    with pytest.raises(cavs.data.KeeperError, match="data has changed since .*run was trained on it; expected the same file"):
        run(keep(moved / "run", files=["data"]))
    moved.rename(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_a_pipe_among_the_files_of_the_data_is_refused(tmp_path: Path) -> None:
    """Reading it waited for a writer forever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is not a regular file"):
        run(keep(tmp_path / "run", files=[tmp_path / "pipe"]))


def test_a_run_with_another_vocabulary_is_reported(tmp_path: Path) -> None:
    """The parameters were those of the words before, and `model.json` named the others."""
    notes = []
    for epochs, words in enumerate(("ab", "ab", "ba"), 1):
        keeper = keep(tmp_path, epochs=epochs, facts={"words": [*words], "epochs": epochs})
        run(keeper)
        notes.append(keeper.notes)
    assert notes == [[], [], ["facts: words: another list, such as of words, than the run was trained with."]]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.parametrize("name", ["model.json", "best.npz"])
def test_a_pipe_is_not_a_checkpoint(tmp_path: Path, name: str) -> None:
    run(keep(tmp_path, epochs=1))
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises((cavs.data.KeeperError, OSError), match="is not a regular file"):
        cavs.data.restore_best(tmp_path, jnp.float32(0))


# ---- one process, and processes that end ----


def test_one_keeper_at_a_time_has_a_folder(tmp_path: Path) -> None:
    (tmp_path / ".last.npz.0123456789ab.tmp").write_bytes(b"half")
    with keep(tmp_path):
        assert not list(tmp_path.glob(".*.tmp"))  # of a save that was killed
        with pytest.raises(cavs.data.KeeperError, match=f"process {os.getpid()} on .* is training in it. Wait until it ends"):
            run(keep(tmp_path))
    run(keep(tmp_path))


def test_nothing_is_written_without_a_lock(tmp_path: Path) -> None:
    """Two keepers that were used without `with` wrote over each other's files."""
    keeper, message = keep(tmp_path), r"Keeper.{}: got a call outside of the keeper's `with` block, .* Write with cavs.data"
    with pytest.raises(RuntimeError, match=message.format("restore")):
        keeper.restore(start())
    with keeper:
        state = keeper.restore(start())
    before = (tmp_path / "model.json").read_bytes()
    for method, call in {"save": lambda: keeper.save(state), "score": lambda: keeper.score(state, {"loss": 1.0})}.items():
        with pytest.raises(RuntimeError, match=message.format(method)):
            call()
    assert {x.name: x.read_bytes() for x in tmp_path.iterdir() if x.name != ".lock"} == {"model.json": before}


@pytest.mark.parametrize("name", ["best.npz", "history.json", "last.npz"])
def test_files_that_belong_to_no_run_are_kept(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(cavs.data.KeeperError, match=f"got {name} without model.json; expected a new folder, or that of a run"):
        run(keep(tmp_path))
    assert (tmp_path / name).read_bytes() == b"mine" and not (tmp_path / "model.json").exists()


def test_folders_that_are_created_together_differ(tmp_path: Path) -> None:
    names = [cavs.data.new_folder(tmp_path / "runs" / "t").name for _ in range(3)]
    assert names == ["t", "t-2", "t-3"]


class Killed(BaseException):
    """Simulates SIGKILL: no `except Exception` of the program catches it."""


@pytest.mark.parametrize("write", range(1, 8))
def test_a_run_killed_at_any_write_goes_on_to_the_same_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: int) -> None:
    want = run(keep(tmp_path / "whole"))
    left, replace = [write], os.replace

    def dies(*paths: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise Killed
        replace(*paths)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", dies)
        run(keep(tmp_path / "killed"))
    keeper = keep(tmp_path / "killed")
    got = run(keeper)
    assert all(map(np.array_equal, got, want)) and len(keeper.history) == 3


def test_the_error_of_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole = keepers.write_whole

    def full(path: Path, data: bytes) -> None:
        if path.name == keepers.HISTORY:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write_whole(path, data)

    monkeypatch.setattr(keepers, "write_whole", full)
    with pytest.raises(OSError, match="history.json"):
        run(keep(tmp_path))
    monkeypatch.undo()
    assert len(run(keep(tmp_path))) == 2


def test_a_written_file_is_synced_and_so_is_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = [], os.fsync

    def spy(descriptor: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    files.write_whole(tmp_path / "a", b"1")
    assert synced == [False, True] and (tmp_path / "a").read_bytes() == b"1"
    with pytest.raises(RuntimeError), files.replacing(tmp_path / "a") as temporary:
        Path(temporary).write_bytes(b"2")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_bytes() == b"1"


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "語" * 85], ids=len)
def test_the_longest_names_of_file_systems_are_written(tmp_path: Path, name: str) -> None:
    """The name of the temporary file was longer by 18 bytes."""
    files.write_whole(tmp_path / name, b"1")
    cavs.io.save_checkpoint({"a": 1}, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
