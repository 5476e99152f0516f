"""The library of engine `native` in its process: memory that runs out, forked children, cores of a container, other systems."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cavs.kernels import native_unavailable
from cavs.kernels._cpu.build import SOURCE, compiler
from cavs.kernels._cpu.cores import usable_cores
from tests.slow import few

ROOT = Path(__file__).parents[1]
needs_library = pytest.mark.skipif(bool(native_unavailable()), reason=str(native_unavailable()))
needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")


def compiled(tmp_path: Path, code: str, *options: str) -> Path:
    """Compiles a C++ program that includes files of the library."""
    (tmp_path / "test.cpp").write_text(code)
    out = tmp_path / "test.out"
    command = [str(compiler()), "-std=c++17", "-O1", "-pthread", f"-I{SOURCE.parent}", *options]
    done = subprocess.run([*command, str(tmp_path / "test.cpp"), "-o", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


# Lets one allocation of the library fail: the number `fail_at` says from then on, counted from 0.
FAILING = """
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <new>

static std::atomic<bool> counting{false};
static std::atomic<long> seen{0}, failing{-1};

extern "C" long fail_at(long number) {
  counting = false, failing = number;
  long before = seen.exchange(0);
  counting = number >= -1;
  return before;
}

static void* allocated(size_t n, void* caller) {
  Dl_info info;
  bool ours = counting && dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, "/levels-");
  if (ours && seen++ == failing) throw std::bad_alloc();
  if (void* p = malloc(n ? n : 1)) return p;
  throw std::bad_alloc();
}

void* operator new(size_t n) { return allocated(n, __builtin_return_address(0)); }
void* operator new[](size_t n) { return allocated(n, __builtin_return_address(0)); }
"""

OUT_OF_MEMORY = """
import ctypes, sys
import jax, jax.numpy as jnp, numpy as np
from cavs.kernels._cpu import library
library.usable_cores = lambda: 4
import cavs

def f(p, v):
    h = jnp.tanh(v.pull() @ p["w"] + v.gather_all(lambda s: s @ p["u"]))
    v.scatter(h)
    v.push(h)

wide, layers = 64, 3  # each vertex has two children in the layer before, which share them
children = [[] for _ in range(wide)]
children += [[wide * (k - 1) + j, wide * (k - 1) + (j + 1) % wide] for k in range(1, layers) for j in range(wide)]
graph = cavs.Graphs.build([len(children)], [len(c) for c in children], np.concatenate([np.array(c, int) for c in children]))
sched = cavs.schedule(graph)
F = cavs.VertexFunction(f, state=(64,))
p = {"w": np.eye(64, dtype=np.float32), "u": np.eye(64, dtype=np.float32) / 4}
x = np.random.default_rng(0).standard_normal((len(children), 64)).astype(np.float32)
step = jax.jit(jax.grad(lambda p: cavs.run(F, p, sched, x, engine="native").sum()))

def run():
    return [np.asarray(x) for x in jax.tree.leaves(step(p))]

injected = ctypes.CDLL(sys.argv[1])
injected.fail_at.restype, injected.fail_at.argtypes = ctypes.c_long, [ctypes.c_long]
want = run()
injected.fail_at(-1)
run()
count, failed = injected.fail_at(-2), 0
for number in range(count):
    injected.fail_at(number)
    try:
        got = run()
    except Exception as e:
        assert "engine native: out of memory" in str(e), e
        got, failed = want, failed + 1
    injected.fail_at(-2)
    for again in (got, run()):
        assert all(np.array_equal(a, b) for a, b in zip(again, want)), number
print("allocations", count, "failed", failed)
"""


@needs_library
@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="needs LD_PRELOAD")
def test_memory_that_runs_out_is_an_error_of_the_call(tmp_path: Path) -> None:
    """Whichever allocation of the library fails, on whichever thread, the call raises, and the next call is right."""
    shim = compiled(tmp_path, FAILING, "-shared", "-fPIC")
    env = os.environ | {"LD_PRELOAD": str(shim), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY, str(shim)], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    _, count, _, failed = done.stdout.split()
    assert int(failed) > int(count) // 2 > 10, done.stdout


POOL = """
#include "threads.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <vector>

static void check(bool holds, const char* what) {
  if (!holds) printf("wrong: %s\\n", what), fflush(stdout), _exit(1);
}

// Runs tasks that wait for each other, so that a helper must take one. Returns their results.
static std::vector<int> shared(Team& team) {
  std::vector<int> out(100, -1);
  std::atomic<int> begun{0};
  team.run(2, false, [&](int, int64_t) {
    begun++;
    for (int i = 0; i < 2000 && begun < 2; i++) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    check(begun == 2, "no helper came");
  });
  team.run(out.size(), false, [&](int, int64_t i) { out[i] = i * i; });
  return out;
}

static void works() {
  Team team;
  check(team.count() == 4, "the number of threads");
  std::vector<int> out = shared(team);
  for (size_t i = 0; i < out.size(); i++) check(out[i] == (int)(i * i), "a result");
}

// Lets the tasks of one thread throw: the caller's, or the helpers'.
static void throws(bool caller) {
  Team team;
  shared(team);
  bool caught = false;
  try {
    team.run(400, false, [&](int thread, int64_t) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if ((thread == 0) == caller) throw std::runtime_error("on purpose");
    });
  } catch (const std::runtime_error&) {
    caught = true;
  }
  check(caught, "the error is lost");
}

static void in_child() {
  pid_t child = fork();
  if (!child) alarm(60), works(), _exit(0);
  int status = 0;
  waitpid(child, &status, 0);
  check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "in the child");
}

int main() {
  alarm(120);
  Threads::set_count(4);
  in_child();
  works();
  throws(true), throws(false), works();
  in_child();
  std::atomic<int> busy{0};  // a thread that has the pool when the process forks
  std::thread other([&] {
    Team team;
    shared(team);
    for (busy = 1; busy == 1;) std::this_thread::yield();
  });
  while (!busy) std::this_thread::yield();
  in_child();
  busy = 2;
  other.join();
  works();
}
"""


@needs_compiler
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX")
def test_the_pool_after_errors_and_in_forked_children(tmp_path: Path) -> None:
    """An error of a task reaches the caller, and a forked child has threads of its own, also if the parent's are at work."""
    done = subprocess.run([str(compiled(tmp_path, POOL))], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


CORES = [
    ({}, None),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
    # Of those around it the smallest counts.
    (
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
        },
        3,
    ),
    # Version 1; in a container the path may be that of the machine, and then the container's own is the mounted folder.
    (
        {
            "proc/self/cgroup": "5:memory:/docker/1a\n4:cpu,cpuacct:/docker/1a\n0::/docker/1a\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
        4,
    ),
    (
        {
            "proc/self/cgroup": "4:cpu:/a\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
        },
        None,
    ),
    ({"proc/self/cgroup": "0::/../x\n", "sys/fs/cgroup/cpu.max": "not a quota\n"}, None),
]


@pytest.mark.parametrize(("files", "quota"), CORES)
def test_threads_are_those_of_the_container(
    files: dict[str, str], quota: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert usable_cores(tmp_path) == (quota or 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert usable_cores(tmp_path) == 1
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS has none
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert usable_cores(tmp_path) == min(quota or 8, 8)


# Which header declares what the library uses; libc++, the library of macOS, includes fewer others in each than libstdc++ does.
DECLARED = {
    "algorithm": r"std::(min|max|clamp|sort|reverse|fill)\b",
    "atomic": r"std::atomic\b",
    "cmath": r"std::(erf|exp|log|pow|sin|floor)",
    "condition_variable": r"std::condition_variable\b",
    "cstdint": r"\bu?int(32|64)_t\b|\buintptr_t\b",
    "cstdio": r"\bsnprintf\b",
    "cstring": r"\bmem(cpy|set)\b",
    "exception": r"std::(exception|exception_ptr|current_exception|rethrow_exception)\b",
    "functional": r"std::function\b",
    "memory": r"std::unique_ptr\b",
    "mutex": r"std::(mutex|lock_guard|unique_lock)\b",
    "new": r"std::bad_alloc\b",
    "stdexcept": r"std::runtime_error\b",
    "thread": r"std::(thread|this_thread)\b",
    "utility": r"std::(move|integer_sequence|make_integer_sequence)\b",
    "vector": r"std::vector\b",
    "pthread.h": r"\bpthread_\w+\(",
    "unistd.h": r"\b(getpid|fork|sysconf)\(",
}
FILES = [path for path in sorted(SOURCE.parent.iterdir()) if path.suffix in (".h", ".cpp")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_of_the_library_includes_what_it_uses(path: Path) -> None:
    """So it compiles with other standard libraries, too."""
    text = re.sub(r"//.*", "", path.read_text())
    included = set(re.findall(r"#include <([\w.]+)>", text))
    assert included >= {header for header, used in DECLARED.items() if re.search(used, text)}
    assert not re.search(r"__linux__|__APPLE__", text), "the library is the same on every system"


@needs_compiler
@pytest.mark.parametrize("path", few(FILES, 6), ids=lambda path: path.name)
def test_a_file_of_the_library_compiles_alone_on_any_system(path: Path) -> None:
    command = [str(compiler()), "-std=c++17", "-fsyntax-only", "-U__linux__", "-x", "c++", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
