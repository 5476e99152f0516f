"""`Graphs` as a NumPy `.npz` file, which stores the exact arrays and names and is the fastest format to read."""

import io
import os
import struct
import zipfile
from typing import IO, Any

import numpy as np

from cavs._graphs.files import check_path
from cavs._graphs.graphs import NAMES, VALUES, Graphs, check_graphs
from cavs._readers.names import arrays_by_name, nested
from cavs._readers.source import ALLOWANCE, RATIO, Path, format_error, read_bytes, write_bytes

_VERSION = 1
_HEADER, _LENGTHS_AT = 30, 26  # of a member of a zip file: the bytes before it, and where the lengths of name and rest are


def save_npz(graphs: Graphs, path: Path) -> None:
    """Writes graphs to a `.npz` file for [`cavs.io.load_npz`][].

    The file holds the arrays `vertex_offsets`, `child_offsets`, `children` and, if present, `kind`, `label`, `input_id`,
    `graph_label`, `edge_attr` and `x` of `Graphs` (`x/a/b` for an array in dicts).
    Names are stored as concatenated UTF-8 (`<names>.bytes`, uint8) with the length
    of each (`<names>.lengths`, int64). `cavs_version` is the version of this format. The file appears complete or not at all.

    Args:
        graphs: the graphs.
        path: the file, which usually ends in `.npz`; it is compressed if it ends in `.gz`.

    Raises:
        TypeError: `graphs` is something else, or `x` contains other than dicts and arrays.
        ValueError: an array has a dtype that NumPy's files do not store, such as bfloat16.
    """
    check_graphs(graphs, "save_npz(graphs, path)")
    check_path("save_npz", path, "Write save_npz(graphs, path).")
    write_bytes(path, graphs_to_bytes(graphs))


def load_npz(path: Path) -> Graphs:
    """Reads graphs that [`cavs.io.save_npz`][] wrote.

    The file need not be trusted: pickles are refused, all arrays are validated as in `Graphs.build`, and heights are
    computed again.

    Args:
        path: the file; it is decompressed if its name ends in `.gz`.

    Returns:
        The graphs.

    Raises:
        FormatError: the file is damaged, has another version, or its arrays are not valid graphs.
    """
    return graphs_from_bytes(path, read_bytes(path))


def stored_arrays(file: IO[bytes], most: int | None = None) -> dict[str, np.ndarray]:
    """The arrays of a `.npz` file, which may decompress to `most` bytes, `None` for its size. Pickles are refused.

    Raises `Exception` if the file is damaged. zipfile and NumPy raise a dozen types: BadZipFile, struct.error, MemoryError, ...
    """
    length, size = file.seek(0, os.SEEK_END), sum(member.file_size for member in _members(file))
    if size > (length if most is None else most):
        raise ValueError(f"{length} bytes that decompress to {size}")
    file.seek(0)
    with np.load(file, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    if not_arrays := [name for name, x in arrays.items() if not isinstance(x, np.ndarray)]:  # bytes
        raise ValueError(f"its member {not_arrays[0]!r} is not an array")
    return arrays


def _members(file: IO[bytes]) -> list[zipfile.ZipInfo]:
    """The members of a zip file, which follow each other without gaps.

    The bytes of a member have a checksum, but its entry in the directory of the file has none. If one bit of it is wrong,
    `zipfile` can take the next entries for a comment, and hide their members.
    """
    with zipfile.ZipFile(file) as archive:
        members, end = sorted(archive.infolist(), key=lambda m: m.header_offset), 0
        for m in members:
            if m.header_offset != end:
                break
            file.seek(end + _LENGTHS_AT)
            end += _HEADER + sum(struct.unpack("<HH", file.read(4))) + m.compress_size
        if end != archive.start_dir:  # type: ignore[attr-defined]; where the directory begins
            raise ValueError("its directory does not list all that it holds")
    return members


def graphs_to_bytes(graphs: Graphs, stamp: tuple[int, ...] = ()) -> bytes:
    """The content of a `.npz` file. A reader can check the integers of `stamp`."""
    fields = {name: getattr(graphs, name) for name in ("vertex_offsets", "child_offsets", "children", *VALUES)}
    arrays = {"cavs_version": np.int64(_VERSION), "stamp": np.array(stamp, np.int64)}
    arrays |= {name: value for name, value in fields.items() if value is not None}
    for names in NAMES:
        if getattr(graphs, names) is not None:
            # NumPy's arrays of str are padded to the longest and lose trailing NULs. "surrogatepass" is needed because JSON
            # can contain lone surrogates.
            encoded = [name.encode("utf-8", "surrogatepass") for name in getattr(graphs, names)]
            arrays[f"{names}.bytes"] = np.frombuffer(b"".join(encoded), np.uint8)
            arrays[f"{names}.lengths"] = np.array([len(name) for name in encoded], np.int64)
    arrays |= arrays_by_name(graphs.x, "save_npz")
    if refused := [name for name, x in arrays.items() if x.dtype.kind == "V" or x.dtype.isbuiltin == 2]:
        raise ValueError(
            f"save_npz: {refused[0]}: got dtype {arrays[refused[0]].dtype}, which NumPy's files do not store; expected one of "
            "NumPy's own. Write graphs.replace(...) with rows.astype(np.float32)."
        )
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def graphs_from_bytes(path: Path, data: bytes, stamp: tuple[int, ...] | None = None) -> Graphs:
    """The graphs of a `.npz` file's content. `path` is for messages.

    Raises `FormatError` as `load_npz` does, and if the file has another `stamp`.
    """
    try:
        arrays = stored_arrays(io.BytesIO(data), max(ALLOWANCE, RATIO * len(data)))
    except Exception as error:  # see stored_arrays
        raise format_error(path, None, error, "a whole .npz file, as cavs.io.save_npz writes it") from error
    version = arrays.get("cavs_version")
    if version is None or version.shape != () or version != _VERSION:
        got = "no cavs_version" if version is None else f"cavs_version {version!r}"
        raise format_error(path, None, got, f"version {_VERSION} of what cavs.io.save_npz writes")
    if stamp is not None and not np.array_equal(arrays.get("stamp", ()), stamp):
        raise format_error(path, None, "the stamp of another file", f"{stamp}")
    try:
        return _build(arrays)
    except ValueError as error:
        raise format_error(path, None, error, "graphs as cavs.io.save_npz writes them") from error


def has_stamp(data: bytes) -> bool:
    """Whether `graphs_to_bytes` of any version wrote this content with a stamp, as for a cache. `save_npz` writes none."""
    try:
        arrays = stored_arrays(io.BytesIO(data), max(ALLOWANCE, RATIO * len(data)))
    except Exception:  # see stored_arrays
        return False
    return "cavs_version" in arrays and "stamp" in arrays and arrays["stamp"].size > 0


def _build(arrays: dict[str, np.ndarray]) -> Graphs:
    num_children = _counts(arrays, "child_offsets", len(_array(arrays, "children")))
    num_vertices = _counts(arrays, "vertex_offsets", len(num_children))
    fields: dict[str, Any] = {name: arrays.get(name) for name in VALUES}
    fields |= {names: _names(arrays, names) for names in NAMES if f"{names}.bytes" in arrays}
    fields["x"] = nested({name: x for name, x in arrays.items() if name.split("/")[0] == "x"}).get("x")
    return Graphs.build(num_vertices, num_children, arrays["children"], **fields)


def _array(arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
    array = arrays.get(name)
    if array is None or array.ndim != 1 or array.dtype.kind not in "iu":
        got = "no array" if array is None else f"dtype {array.dtype} and shape {array.shape}"
        raise ValueError(f"{name}: got {got}; expected a 1-d array of integers")
    return array


def _counts(arrays: dict[str, np.ndarray], name: str, total: int) -> np.ndarray:
    offsets = _array(arrays, name)
    # Compared instead of subtracted, because differences of hostile values can overflow.
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != total or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"{name}: got invalid offsets; expected values that ascend from 0 to {total}")
    return np.diff(offsets.astype(np.int64))


def _names(arrays: dict[str, np.ndarray], name: str) -> tuple[str, ...]:
    data, lengths = _array(arrays, f"{name}.bytes"), _array(arrays, f"{name}.lengths")
    if data.dtype != np.uint8 or (lengths < 0).any() or (lengths > len(data)).any() or lengths.sum() != len(data):
        raise ValueError(f"{name}.lengths: got invalid lengths; expected a sum of {len(data)}, the length of {name}.bytes")
    text, ends = data.tobytes(), np.cumsum(lengths).tolist()
    return tuple(text[end - n : end].decode("utf-8", "surrogatepass") for end, n in zip(ends, lengths.tolist(), strict=True))
