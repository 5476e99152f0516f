"""What users may get wrong around `cavs.data.Loader`, `step` and `Log`: errors that say what to write, and no wrong numbers."""

import copy
import io
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs

GRAPHS = cavs.from_parents([[2, 2, 4, 4, -1]] * 10, input_id=np.arange(50) % 7)
NAMED = cavs.from_lengths([2], label=[0, 1], label_names=["a", "b"], input_id=[0, 1], vocab=["x", "y"])


def loader(batches, **options):
    return cavs.data.Loader(GRAPHS, batches, **options)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([[0, 1], [3, 99]], r"Loader: batches: index: got graphs 3 to 99; expected indices into 10 graphs"),
        ([[0.0, 1.0]], r"Loader: batches: index: got dtype float64 and shape \(2,\); expected"),
        (["ab"], "Loader: batches: got 'ab' in place of a batch"),
        (
            range(4),
            r"Loader: batches: got 0 in place of a batch; expected an integer array, .*batches=\[numbers\] for one batch",
        ),
        (np.arange(3), "Loader: batches: got .*0.* in place of a batch"),
        ([np.zeros(0, int)], r"Loader: batches: got array\(\[\], dtype=int64\), which selects no graph"),
    ],
)
def test_given_batches(batches, message):
    for given in (batches, iter(batches)):
        with pytest.raises((IndexError, ValueError), match=message):
            list(loader(given, steps=1))


def test_a_state_that_a_step_has_taken_is_named():
    step = cavs.data.step(lambda state, sched: (state + 1, state))
    batch = next(iter(loader(10, steps=1)))
    state, _ = step(jnp.zeros(3), batch)
    step(state, batch)
    with pytest.raises(ValueError, match="step: state: got arrays whose memory an earlier step has reused"):
        step(state, batch)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jax.jit(lambda s: s.pad(np.ones(50)))(cavs.schedule(GRAPHS)), ValueError, "got a traced schedule, inside"),
        (lambda: jax.jit(lambda s: len(s.widths))(cavs.schedule(GRAPHS)), ValueError, "Call them before the jitted function"),
        (lambda: cavs.interop.from_edge_index(np.ones((2, 3)), num_nodes=4), ValueError, "edge_index: got dtype float64"),
        (lambda: cavs.interop.load_forward("model.bin"), TypeError, r"data: got a str; expected .* Write .*read_bytes"),
        (lambda: cavs.io.read_netlist(io.StringIO("")), TypeError, "path: got a StringIO; expected the path of a file"),
        (lambda: cavs.read(None), TypeError, "path: got a NoneType; expected the path of a file"),
        (lambda: cavs.read(b"a.txt"), TypeError, "path: got a bytes; expected the path of a file"),
        (lambda: loader(5, shuffle="no"), TypeError, "Loader: shuffle: got 'no'; expected True or False"),
        (lambda: cavs.data.step(lambda s, b: (s, b), donate="no"), TypeError, "step: donate: got 'no'; expected True or False"),
        (lambda: cavs.read_trees(["(1 a)"], cache=0), TypeError, "read_trees: cache: got 0; expected True or False"),
        (lambda: cavs.io.read_tagged("a.txt", labelled="no"), TypeError, "read_tagged: labelled: got 'no'; expected True or"),
        (
            lambda: cavs.io.save_params("w.safetensors", {}),
            TypeError,
            r"save_params: path: got a dict; .* Write save_params\(params, path\)",
        ),
        (
            lambda: cavs.io.save_checkpoint({}, "run.npz", {"step": 3}),
            TypeError,
            "save_checkpoint: loaders: got a dict; expected cavs.data.Loader. Put other values into the state",
        ),
        (
            lambda: cavs.io.save_params({}, "w.safetensors", {"hidden": 64}),
            TypeError,
            "save_params: metadata: got 'hidden': 64; expected strings. Write {'hidden': str",
        ),
        (lambda: cavs.io.save_params({}, "w.safetensors", "x"), TypeError, "save_params: metadata: got a str; expected a dict"),
        (lambda: cavs.read_trees("a\0b"), ValueError, r"read: path: got 'a\\x00b'; expected the path of a file, without NUL"),
        (lambda: cavs.io.save_npz(GRAPHS, "a\0b"), ValueError, "save_npz: path: got .*, without NUL characters"),
        (lambda: cavs.data.new_folder("a\0b"), ValueError, "new_folder: path: got .* of a folder, without NUL characters"),
        (lambda: cavs.data.with_labels(NAMED, {"a", "b"}), TypeError, "with_labels: labels: got a set, whose order is"),
        (lambda: cavs.data.vocabulary(NAMED, {"<s>"}), TypeError, "vocabulary: special: got a set, whose order is"),
        (lambda: cavs.data.vocabulary(NAMED, size=-1), ValueError, "vocabulary: size: got -1; expected an int >= 0"),
        (lambda: loader(5, group=np.array(["random", "similar"])), ValueError, r"Loader: group: got array\(.*expected one of"),
        (lambda: loader(5, last=["drop"]), ValueError, r"Loader: last: got \['drop'\]; expected one of 'short', 'drop', 'pad'"),
        (lambda: cavs.io.read_conllu("a", label=["upos"]), ValueError, r"read_conllu: label: got \['upos'\]; expected one of"),
        (lambda: cavs.data.is_root(3), TypeError, r"is_root: graphs: got a int; expected cavs.Graphs. Write is_root\(graphs\)"),
        (lambda: cavs.data.graph_of(3), TypeError, "graph_of: graphs: got a int; expected cavs.Graphs"),
        (lambda: cavs.data.example("reviews"), ValueError, "name: got 'reviews'; expected one of 'reviews.dev'"),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_negative_and_boolean_indices_select_as_numpy_does():
    some = [x.graph_end.copy() for x in loader([[0, -1], np.arange(10) < 3, slice(4, 6), [7]], steps=1)]
    assert [np.count_nonzero(np.diff(x, prepend=0)) for x in some] == [2, 3, 2, 1]


def test_other_arguments():
    with pytest.raises(ValueError, match="Loader: graphs: got no graphs; expected at least one"):
        cavs.data.Loader(GRAPHS[:0], 4)
    with pytest.raises(TypeError, match=r"Loader: fields: got 'input_id'; .* Write fields=\('input_id',\)"):
        loader(4, fields="input_id")
    position = loader(np.int64(4), seed=np.int32(3), steps=np.int64(1), mesh=None, last="drop").state()
    assert all(type(x) is int for x in position.values())
    assert loader(np.array(4), last="drop", steps=jnp.array(1), seed=np.array(3, np.uint8)).state() == position
    with pytest.raises(TypeError, match="Log: loader: got a NoneType; expected the cavs.data.Loader"):
        cavs.data.Log(None, print)  # type: ignore


def test_a_loader_within_an_epoch_and_its_step_are_copied():
    """As inside of an object that holds both: a step could not be copied once it had run."""

    @cavs.data.step
    def step(count, sched):
        return count + 1, {"sum": {"of": sched.input_id.sum()}}

    one = loader(4, steps=2)
    state = step(jnp.int32(0), next(iter(one)))[0]
    other, other_step = copy.deepcopy((one, step))
    for batches in other:  # the rest of the epoch; its last batch is short
        state, sums = other_step(state, batches)
    assert (int(state), sums["sum"]["of"].shape) == (3, (1,)) and other_step.compilations == 1


def test_fields_of_a_generator_are_those_of_all_data_sets():
    """The second data set had none, and neither had a copy of the loader."""
    two = cavs.data.Loader([GRAPHS, GRAPHS], 4, fields=(name for name in ("input_id",)), steps=1)
    for batches in (next(iter(two)), next(iter(copy.deepcopy(two)))):
        assert all(np.array_equal(sched.input_id, batches[0].input_id) for sched in batches)


def test_copies_of_loaders_over_iterators_are_refused():
    """The copy got what was left of the iterator, or nothing."""
    one = loader(iter([[0], [1], [2]]), steps=1)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(
            TypeError, match=r"got a copy or a pickle of .* an iterator; .* Write Loader\(graphs, \[\*batches\]\)"
        ):
            copied(one)
    assert len([*one]) == 3


class Slotted(cavs.data.Loader):
    __slots__ = ("name",)


def test_copies_of_a_subclass_have_what_it_keeps_in_slots():
    """A copy had none of it."""
    one = Slotted(GRAPHS, 4)
    one.name, one.other = "train", 3
    for other in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert (other.name, other.other, other.state()) == ("train", 3, one.state())


@pytest.mark.parametrize("steps", [1, 2])
def test_arrays_that_compiled_code_would_misread_are_refused(steps):
    """Numbers of another byte order became others once a program was compiled, and a stack took what is below a mask."""
    step = cavs.data.step(lambda state, x: (state, {"sum": x.sum()}))
    ones, text = np.ones(4, np.float32), "Loader: collate: got a leaf of .*values of dtype .*; expected numbers, none of them"
    for batches in loader(4, steps=steps, last="drop", collate=lambda sample: ones):
        assert step(0, batches)[1]["sum"].ravel().tolist() == [4] * steps
    for rows in (ones.astype(">f4"), np.ma.array(ones, mask=[1, 0, 0, 0]), np.array(["a"]), ones.astype(np.longdouble)):
        with pytest.raises(TypeError, match=text):
            next(iter(loader(4, steps=steps, last="drop", collate=lambda sample, rows=rows: rows)))
        with pytest.raises(TypeError, match="evaluate: params: got a leaf of .*values of dtype"):
            cavs.data.evaluate(lambda params, sched: {"a": params.sum()}, rows, loader(5))
    with pytest.raises(TypeError, match="evaluate: params: got a leaf of 'a'; expected numbers"):
        cavs.data.evaluate(lambda params, sched: {}, ["a"], loader(5))


@pytest.mark.parametrize(
    ("leaf", "write"), [(1.0, r"Write np.asarray\(x\)"), (np.float32(1), "Write np.asarray"), (jnp.ones(2), "Omit jnp.asarray")]
)
def test_leaves_of_collate_that_cannot_be_stacked_get_a_hint(leaf, write):
    with pytest.raises(TypeError, match=f"Loader: collate: got a leaf of type .*; expected NumPy arrays, .* {write}"):
        next(iter(loader(4, steps=2, last="drop", collate=lambda sample: leaf)))


def test_a_mesh_is_copied_but_not_pickled():
    """JAX said only that it cannot pickle a device."""
    one = loader(4, mesh=jax.make_mesh((1,), ("data",)))
    assert copy.deepcopy(one).state() == copy.copy(one).state() == one.state()
    with pytest.raises(TypeError, match=r"Loader: mesh: got a pickle .* Pickle loader.state\(\), .* and restore\(state\)"):
        pickle.dumps(one)


@pytest.mark.parametrize(
    "state", [None, {}, {"epoch": 3}, {"epoch": 0, "batch": -1, "seen": 0, "steps": 1, "order": 0}, [1, 2, 3, 4]]
)
def test_positions(state):
    with pytest.raises(ValueError, match=r"Loader.restore: state: got .*; expected what Loader.state\(\) returned"):
        loader(4).restore(state)


def test_a_position_behind_the_last_batch_and_one_of_numpy_integers():
    one = loader(2, steps=1)
    position = {name: np.int64(x) for name, x in one.state().items()}
    with pytest.raises(ValueError, match="got the position of a loader with other batches"):
        one.restore(position | {"batch": 6})
    one.restore(position | {"batch": np.int64(3)})
    assert len([*one]) == 2


@pytest.mark.parametrize(
    "values",
    [
        [np.zeros(3, np.float32), np.zeros(1, np.float32)],
        [np.zeros(3, np.int32), np.full(3, 0.5, np.float32)],
        [{"a": np.zeros(3), "b": np.ones(3)}, {"a": np.zeros(3), "c": np.ones(3)}],
        [np.zeros((3, 1)), np.zeros(3)],
    ],
)
def test_batches_that_are_stacked_are_alike(values):
    left = iter(values)
    with pytest.raises(
        ValueError, match=r"Loader: collate: got .* for one batch and .* for another; expected equal structures"
    ):
        next(iter(loader([[0], [1]], collate=lambda sample: next(left), steps=2)))


@pytest.fixture
def of_32_bits():
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)


@pytest.mark.parametrize("steps", [1, 2])
def test_integers_that_jax_would_cut(steps, of_32_bits):
    for large in (np.array([2**31]), np.array([-(2**31) - 1]), np.array([2**32], np.uint64)):
        with pytest.raises(
            ValueError, match="Loader: collate: got a leaf of dtype u?int64 with values .* expected values that fit"
        ):
            next(iter(loader(5, collate=lambda sample, large=large: large, steps=steps)))
    fits = np.array([2**31 - 1, -(2**31)])
    for batches in loader(5, collate=lambda sample: fits, steps=2):
        _, total = cavs.data.step(lambda state, batch: (state, batch))(0, batches)
        assert (np.asarray(total) == fits).all()


@pytest.mark.parametrize("meshed", [False, True])
def test_numbers_of_a_state_that_jax_would_cut(meshed, of_32_bits):
    (batches,) = loader(5, steps=2, mesh=jax.make_mesh((1,), ("data",)) if meshed else None)
    keep = cavs.data.step(lambda state, batch: (state, 0))
    integers = [np.array([1, 2**31]), np.int64(-(2**31) - 1), np.array(2**32, np.uint64)]
    for x in [*integers, np.array([1e300, np.inf, np.nan]), -1e300]:
        with pytest.raises(
            ValueError, match=r"step: state: got a leaf \['sum'\]\['n'\] of dtype u?(int|float)64 with .*; expected"
        ):
            keep({"sum": {"n": x}}, batches)
    with pytest.raises(OverflowError, match=r"step: state: got a leaf \[0\] that is 4294967296; expected"):
        keep([2**32], batches)
    with pytest.raises(TypeError, match=r"step: state: got a leaf \[0\] that is traced, .* Call it outside, or write step"):
        jax.jit(lambda x: cavs.data.step(lambda state, sched: (state, 0))((x,), next(iter(loader(4)))))(jnp.ones(2))
    with pytest.raises(TypeError, match=r"step: state: got a leaf \[1\] that is 'relu'; expected arrays and numbers .*equinox"):
        keep([1, "relu"], batches)
    fits = [np.array([2**31 - 1, -(2**31)]), np.uint64(2**32 - 1), np.array([1e38, -np.inf, np.nan]), np.zeros(0, int)]
    state, _ = keep(fits, batches)
    for x, y in zip(fits, state, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            lambda state: {"a": state},
            "step: one: returned a dict; expected the new state and the metrics. Write return state, loss",
        ),
        (lambda state: None, "step: one: returned a NoneType"),
        (lambda state: (state, 1.0, 2.0), "step: one: returned 3 results"),
        (
            lambda state: ({"w": state["w"].astype(jnp.bfloat16)}, 1.0),
            r"step: one: returned a state whose \['w'\] is bfloat16\[2\]; expected float32\[2\], .* x.astype\('float32'\)",
        ),
        (
            lambda state: ({"w": state["w"][:1]}, 1.0),
            r"step: one: returned a state whose \['w'\] is float32\[1\]; expected float32\[2\]",
        ),
        (
            lambda state: (state, {"loss": 1.0, "name": "first"}),
            r"step: one: metrics: got a str at \['name'\]; expected only arrays of numbers. Keep texts outside of the step",
        ),
        (lambda state: (state["w"], 1.0), "step: one: returned a state of structure .*; expected that of the old state"),
    ],
)
def test_what_a_step_returns(result, message):
    def one(state, batch):
        return result(state)

    (batches,) = loader(5, steps=2)
    with pytest.raises(TypeError, match=message):
        cavs.data.step(one)({"w": jnp.zeros(2, jnp.float32)}, batches)


def test_numbers_of_python_in_the_state():
    def one(state, batch):
        return {"count": state["count"] + 1, "sum": state["sum"] + 0.5, "none": None}, state["count"]

    (batches,) = loader(5, steps=2)
    state, counts = cavs.data.step(one)({"count": 0, "sum": 0.0, "none": None}, batches)
    assert counts.tolist() == [0, 1] and float(state["sum"]) == 1.0


@pytest.mark.parametrize("unroll", [0, -1, 1.5, True])
def test_unroll(unroll):
    with pytest.raises(ValueError, match="step: unroll: got .*; expected an int >= 1 or None"):
        cavs.data.step(unroll=unroll)(print)


HELD = """
import sys, time, jax, jax.numpy as jnp, cavs
graphs = cavs.from_parents([[2, 2, 4, 4, -1]] * 40)
loader = cavs.data.Loader(graphs, 4, ahead={ahead}, steps=2)
loop = iter(loader)
next(loop)
log = cavs.data.Log(loader, lambda report: time.sleep(0.3))
for batches in loader:
    log(jnp.zeros(2))
"""


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_script_ends_in_silence_with_a_loop_that_it_holds_and_a_log_that_waits(ahead):
    done = subprocess.run(
        [sys.executable, "-c", HELD.format(ahead=ahead)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and not done.stderr


def test_a_step_under_jit_in_place_of_its_decorator():
    (batches,) = loader(10)
    with pytest.raises(AttributeError, match="'roots'; it holds 1 batch for one dispatch. .* @cavs.data.step, without jax.jit"):
        batches.roots  # noqa: B018
    with pytest.raises(AttributeError, match="'roots'; it holds batches for one dispatch. Decorate"):
        jax.jit(lambda state, sched: (state, sched.roots))(0, next(iter(loader(2))))
