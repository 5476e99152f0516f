"""The sample files that come with cavs."""

from pathlib import Path

_FOLDER = Path(__file__).parent.parent / "data"


def example(name: str) -> str:
    """Returns the path of a sample file that comes with cavs, for [`cavs.read`][].

    ```python
    train = cavs.read(cavs.data.example("reviews.train"))             # 439 trees of short reviews, rated from 0 to 4
    dev = cavs.read(cavs.data.example("reviews.dev")).with_vocab(train.vocab)
    ```

    Args:
        name: "reviews.train" or "reviews.dev".

    Raises:
        ValueError: there is no such file.
    """
    names = sorted(path.stem for path in _FOLDER.glob("*.txt"))
    if name not in names:
        raise ValueError(f"example: name: got {name!r}; expected one of {', '.join(map(repr, names))}.")
    return str(_FOLDER / f"{name}.txt")
