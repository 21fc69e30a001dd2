"""The commands of docs run as they stand, one page after another in one place; what only clusters can do is dry-run."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# in this order: later pages use what earlier ones have made
PAGES = ["training", "model", "retrieval", "serving", "operations", "data-format", "features", "daily"]


def commands(page):
    """Of a page's ``sh`` blocks; what is in ``py`` blocks runs in between, on what the commands have made."""
    found = []
    for kind, block in re.findall(r"^```(sh|py)\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        found += block.splitlines() if kind == "sh" else [f"python -c {shlex.quote(block)}"]
    return found


@pytest.mark.timeout(1800)
def test_the_commands_of_the_docs_run(tmp_path):
    for name in ("configs", "fuxi_torchrec", "pipelines", ".torchxconfig"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for page in PAGES:
        for command in commands(ROOT / "docs" / f"{page}.md"):
            line = command.replace("torchx run -s ", "torchx run --dryrun -s ")
            done = subprocess.run(
                ["bash", "-ec", line],
                cwd=tmp_path,
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            assert done.returncode == 0, f"{page}: {command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


def test_every_page_with_commands_is_run():
    assert sorted(PAGES) == sorted(page.stem for page in (ROOT / "docs").glob("*.md") if commands(page))
