"""The Python in README and docs runs, each page in a process of its own, block after block; so do README's commands."""

import os
import re
import shlex
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import httpx
import pytest
import yaml

from benchmarks import experiments, report, rows
from fuxi_torchrec.config import load_config
from fuxi_torchrec.serving.tests.random_export import write_demo_export
from integration_tests.services import Service

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page, tmp_path):
    write_demo_export(tmp_path / "export")  # pages that read an export take this one for the reader's own
    script = tmp_path / f"{page.stem}.py"
    script.write_text("import torch\n" + "\n\n".join(blocks(page)))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr


def test_the_sharded_example_runs_on_two_ranks(tmp_path):
    (code,) = [block for block in blocks(ROOT / "docs" / "plug-in.md") if "DistributedModelParallel" in block]
    script = tmp_path / "sharded.py"
    script.write_text(code)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    done = subprocess.run(launch, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2: loss" in done.stdout


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.timeout(600)
def test_the_commands_of_the_readme_run(tmp_path):
    for name in ("configs", "fuxi_torchrec", "pipelines", ".torchxconfig"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    commands = [line for block in plain_blocks(ROOT / "README.md") for line in block.splitlines()]
    ran = []
    for command in commands:
        words = shlex.split(command, comments=True)
        if words[0] in ("make", "source"):
            continue
        if "pipelines.serve" in words:
            with Service(tmp_path / words[words.index("--export") + 1]) as service:
                assert httpx.get(f"{service.url}/health").status_code == 200
        else:
            done = subprocess.run(
                words, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        ran += words
    for program in ("train", "evaluate", "export", "recommend", "refresh", "serve"):
        assert f"pipelines.{program}" in ran


def plain_blocks(page):
    text = re.sub(r"^```python\n.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^```\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def test_tables_of_results_are_made_from_the_file_beside_them(tmp_path):
    page, results = tmp_path / "results.md", ROOT / "docs" / "results"
    page.write_text((ROOT / "docs" / "results.md").read_text())
    report.write(results, page, figures=tmp_path)
    assert page.read_text() == (ROOT / "docs" / "results.md").read_text(), "python -m benchmarks.experiments report"
    done = report.read(results)
    assert done.keys() <= {row.name for row in rows.ROWS}
    for row in rows.ROWS:
        if row.name in done:
            assert done[row.name]["commands"] == experiments.commands_of(row)
            then = tmp_path / "then.yaml"  # what a row sets itself may change in the file
            then.write_text(yaml.safe_dump(done[row.name]["config"]))
            now = load_config(ROOT / row.config, row.settings)
            assert load_config(then, row.settings) == now, f"{row.config} has changed since"
    for study in report.TABLES:
        for group in report.groups([row for row in rows.ROWS if row.study == study]).values():
            pattern = report.runs(group).strip("`")
            assert [row for row in rows.ROWS if fnmatchcase(row.name, pattern)] == group
