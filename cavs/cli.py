"""The command line: `cavs train`, `cavs predict`, `cavs evaluate`, `cavs inspect`."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from cavs._cli import start  # nothing else: Ctrl-C is handled after these imports


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: the command line without the program's name; `None` reads `sys.argv`.

    Returns:
        The exit code: 0; 1 if a file cannot be read or written, or the memory is exhausted; 2 for invalid arguments or files;
        130 after Ctrl-C.
    """
    if arguments is not None:
        return _main([*arguments])
    with start.exit_on_interrupt():
        return _main(sys.argv[1:])


def _main(arguments: list[str]) -> int:
    from cavs._cli.completion import script
    from cavs._cli.options import build_parser
    from cavs._cli.parser import parse

    parser = build_parser()
    given: dict[str, Any] = parse(parser, arguments)
    command = given.pop("command")
    if command is None:
        parser.print_help()
        return 0
    if command == "completion":
        print(script(parser, given["shell"]), end="")
        return 0
    return _run(command, given)


def _run(command: str, given: dict[str, Any]) -> int:
    from cavs._readers import FormatError
    from cavs._train import OUT_OF_MEMORY, TrainError, out_of_memory

    try:
        return _COMMANDS[command](given)
    except (TrainError, FormatError) as error:
        print(f"cavs {command}: {error}", file=sys.stderr)
        return error.code if isinstance(error, TrainError) else 2
    except FileNotFoundError as error:
        print(f"cavs {command}: {error.filename} does not exist.", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `cavs predict ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        name = "a file" if error.filename is None else error.filename
        print(f"cavs {command}: {name} cannot be read or written ({error.strerror or error}).", file=sys.stderr)
        return 1
    except OUT_OF_MEMORY as error:
        if not out_of_memory(error):
            raise
        print(f"cavs {command}: out of memory. Read a smaller file, or lower --batch or --hidden.", file=sys.stderr)
        return 1
    except (RuntimeError, AssertionError):
        if not (platforms := os.environ.get("JAX_PLATFORMS")) or _jax_starts():
            raise
        text = f"JAX_PLATFORMS: got {platforms!r}, on which JAX cannot start here; expected a platform of this machine"
        print(f"cavs {command}: {text}. Write JAX_PLATFORMS=cpu, or install cavs[cuda] for a GPU.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"cavs {command}: interrupted", file=sys.stderr)
        return 130


def _jax_starts() -> bool:
    """Whether JAX finds the devices of `JAX_PLATFORMS`. Called after an error, when this takes no time."""
    import jax

    try:
        return bool(jax.devices())
    except (RuntimeError, AssertionError):
        return False


def _train(given: dict[str, Any]) -> int:
    from cavs._step.host_memory import keep_host_memory
    from cavs._train import compile_quickly, connected, keep_compiled, train, with_settings

    keep_host_memory()
    compile_quickly()
    keep_compiled()
    files = given.pop("train", [])
    given |= {"train": files[0]} if files else {}
    given |= {"also": os.pathsep.join(map(os.path.abspath, files[1:]))} if files[1:] else {}
    given = with_settings(given)
    out, resume, distributed = (given.pop(name, None) for name in ("out", "resume", "distributed"))
    given |= {} if distributed is None else {"devices": 0}
    with connected(distributed):
        return train(given, out, resume, command=start.program())


def _predict(given: dict[str, Any]) -> int:
    from cavs._train import Asked, allocate_when_needed, compile_quickly, keep_compiled, predict

    compile_quickly()
    allocate_when_needed()
    keep_compiled()
    asked = Asked(given.get("vertices", False), given.get("probabilities", False))
    header = not given.get("no_header", False)
    predict(given["checkpoint"], given["file"], given.get("out"), asked, given.get("json", False), header)
    return 0


def _evaluate(given: dict[str, Any]) -> int:
    from cavs._train import allocate_when_needed, compile_quickly, evaluate, keep_compiled

    compile_quickly()
    allocate_when_needed()
    keep_compiled()
    evaluate(given["checkpoint"], given["file"], given.get("json", False), given.get("out"))
    return 0


def _inspect(given: dict[str, Any]) -> int:
    from cavs._debug.inspect import inspect
    from cavs._train import TrainError, guess_task, read_samples
    from cavs._train.config import check_file

    check_file("file", given["file"])
    task = given.get("task") or guess_task(given["file"])
    try:
        inspect(given["file"], given.get("batch", 64), given.get("out"), lambda path: read_samples(path, task))
    except ValueError as error:
        raise TrainError(str(error)) from error
    return 0


_COMMANDS: dict[str, Callable[[dict[str, Any]], int]] = {
    "train": _train,
    "predict": _predict,
    "evaluate": _evaluate,
    "inspect": _inspect,
}


if __name__ == "__main__":
    sys.exit(main())
