"""All benchmarks, one after another: `make bench`.

    python -m benchmarks [encoder data ...]

Each writes its part of RESULTS.md. Exit code 1 if any of them missed a figure or failed.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks import harness

ALL = (
    *("encoder", "backends", "encoders", "data", "training", "repeats", "retrieval", "serving", "planning"),
    *("faults", "quality"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them; say at the end how each went."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(ALL)}; all by default")
    names = parser.parse_args(arguments).names or list(ALL)
    if unknown := [name for name in names if name not in ALL]:
        parser.error(f"no benchmark {', '.join(unknown)}: there are {', '.join(ALL)}")
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"the load is {load:.1f}: on a machine that is not idle figures are worse", flush=True)
    rows, failed = [], False
    for number, name in enumerate(names, 1):
        print(f"\n[{number} of {len(names)}] python -m benchmarks.{name}", flush=True)
        began = time.monotonic()
        code = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode
        failed |= code != 0
        how = {0: "reached", 1: "MISSED"}.get(code, f"failed with {code}")
        rows.append([name, how, f"{(time.monotonic() - began) / 60:.1f} min"])
    print("\n" + harness.table(["benchmark", "aims", "time"], rows))
    print(f"figures: {harness.RESULTS}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
