"""The boxes and what each may import: dependencies point downwards only."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fuxi_torchrec import encoders

PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE.parent

# box -> what of fuxi_torchrec it may import beside itself, lowest first
ALLOWED = {
    "errors": set(),
    "logging": set(),
    "machine": set(),
    "artifacts": {"errors"},
    "distributed": {"errors"},
    "options": {"encoders", "errors"},
    "processes": {"artifacts"},
    "schema": set(),
    "strict_yaml": {"errors", "schema"},
    "worker_group": set(),
    "doctor": {"machine", "ops", "worker_group"},
    "ops": set(),
    "encoders": {"ops"},
    "events": {"errors", "logging", "schema"},
    "tasks": {"encoders", "events", "ops", "options"},
    "config": {"distributed", "encoders", "events", "options", "strict_yaml", "tasks"},
    "data": {"artifacts", "events", "logging", "machine", "options", "processes", "schema"},
    "embeddings": {"config", "data", "distributed", "errors", "events", "tasks"},
    "training": {
        *("tasks", "embeddings", "data", "events", "encoders"),
        *("config", "strict_yaml", "logging", "distributed", "artifacts", "errors", "machine", "schema"),
    },
    "evaluation": {
        *("training", "tasks", "embeddings", "data", "events", "encoders"),
        *("config", "logging", "distributed", "artifacts", "errors", "options"),
    },
    "export": {
        *("evaluation", "training", "tasks", "embeddings", "data", "events", "encoders"),
        *("strict_yaml", "logging", "distributed", "artifacts", "errors", "options", "schema"),
    },
    "serving": {"export", "tasks", "events", "encoders", "logging", "artifacts", "options"},
    "api": {"export", "evaluation", "training", "data", "events", "config", "distributed", "artifacts"},
}
# third-party packages, and the boxes that may import them
ONLY_IN = {"torchrec": {"embeddings", "doctor"}, "fbgemm_gpu": {"embeddings", "doctor"}, "torchx": set()}
TORCH_ONLY = {"ops", "encoders"}
KERNELS = PACKAGE / "ops" / "triton"  # imported when a CUDA device is used
DRAWINGS = "explain.py"  # of an encoder: matplotlib, imported when something is drawn
TORCH_AND_NUMPY = {"tasks"}


def box_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def sources():
    return [p for p in sorted(PACKAGE.rglob("*.py")) if "tests" not in p.parts and p != PACKAGE / "__init__.py"]


def pipelines():
    return [path for path in sorted((ROOT / "pipelines").rglob("*.py")) if "tests" not in path.parts]


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "fuxi_torchrec":
                yield from (f"fuxi_torchrec.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_box_imports_only_what_lies_below_it(path):
    box = box_of(path)
    for name in imports_of(path):
        top, _, rest = name.partition(".")
        if top == "fuxi_torchrec":
            inner = rest.partition(".")[0]
            assert inner in ALLOWED[box] | {box, "__version__"}, f"{box} must not import {name}"
        elif top in ONLY_IN:
            assert box in ONLY_IN[top], f"{box} must not import {name}"
        elif box in TORCH_ONLY:
            special = (top == "matplotlib" and path.name == DRAWINGS) or (top == "triton" and KERNELS in path.parents)
            assert top == "torch" or top in sys.stdlib_module_names or special, f"{box} must not import {name}"
        elif box in TORCH_AND_NUMPY:
            assert top in {"torch", "numpy"} or top in sys.stdlib_module_names, f"{box} must not import {name}"


def test_nothing_is_allowed_that_nobody_needs():
    used = {box: set() for box in ALLOWED}
    for path in sources():
        used[box_of(path)] |= {name.split(".")[1] for name in imports_of(path) if name.startswith("fuxi_torchrec.")}
    for box, allowed in ALLOWED.items():
        assert allowed <= used[box], f"{box}: {allowed - used[box]}"


def test_nobody_outside_encoders_names_one_of_them():
    """A new encoder touches its own file and the registry."""
    names = set(encoders.kinds())
    assert {"fuxi_linear", "hstu"} < names
    for path in [*(path for path in sources() if box_of(path) != "encoders"), *pipelines()]:
        for node in ast.walk(ast.parse(path.read_text())):
            words = [node.id] if isinstance(node, ast.Name) else []
            words += [node.attr] if isinstance(node, ast.Attribute) else []
            words += [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            words += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            words += [node.value] if isinstance(node, ast.Constant) and node.value in names else []
            for name in names:
                told = [word for word in words if name.replace("_", "") in word.lower().replace("_", "")]
                assert not told, f"{path}:{getattr(node, 'lineno', 0)} names {told[0]}"


def test_no_box_is_forgotten():
    assert {box_of(p) for p in sources()} <= set(ALLOWED)


def test_readme_and_contributing_name_every_box_and_page_and_no_other():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"tests"}
    rows = [line.split("|")[1] for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| `")]
    named = re.findall(r"`(?:fuxi_torchrec/)?(\w+)`", " ".join(row for row in rows if "fuxi_torchrec/" in row))
    assert set(named) == folders
    (shown,) = (line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| `docs/` |"))
    assert set(re.findall(r"\(docs/([\w-]+\.md)\)", shown)) == {path.name for path in (ROOT / "docs").glob("*.md")}
    table = re.findall(r"(?m)^\| `(\w+\.py)` \|", (ROOT / "docs" / "contributing.md").read_text())
    assert set(table) == {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}


def test_importing_the_package_brings_nothing_heavy():
    code = "import fuxi_torchrec, sys; print({'torchrec', 'fbgemm_gpu', 'numpy', 'pyarrow', 'yaml'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


def test_every_public_name_is_there_and_the_functions_stay_functions_whatever_was_imported():
    import fuxi_torchrec
    import fuxi_torchrec.export.bundle

    assert dir(fuxi_torchrec) == sorted(fuxi_torchrec.__all__)
    assert all(hasattr(fuxi_torchrec, name) for name in fuxi_torchrec.__all__)
    for name in ("prepare", "train", "evaluate", "export", "refresh"):
        assert callable(getattr(fuxi_torchrec, name)), name
    with pytest.raises(AttributeError, match="no attribute 'exprot'"):
        fuxi_torchrec.exprot  # noqa: B018


def test_every_public_name_has_an_example_that_runs():
    import fuxi_torchrec

    examples = " ".join(line for path in sources() for line in path.read_text().splitlines() if ">>> " in line)
    for name in set(fuxi_torchrec.__all__) - {"__version__"}:
        assert re.search(rf"\b{name}\(|\b{name}\.", examples), f"{name}: no doctest uses it"


def test_preparing_and_serving_need_no_torchrec():
    code = (
        "import sys; from fuxi_torchrec import Bundle, Recommender, load_config, prepare, refresh\n"
        "from fuxi_torchrec import EvaluateOptions, ExportOptions, PrepareOptions, export, train\n"
        "print({'torchrec', 'fbgemm_gpu'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


def test_files_and_functions_fit_in_a_head():
    for path in [PACKAGE / "__init__.py", *sources(), *pipelines(), *(ROOT / "benchmarks").rglob("*.py")]:
        text = path.read_text()
        assert len(text.splitlines()) <= 400, f"{path}: {len(text.splitlines())} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                assert lines <= 80, f"{path}: {node.name} has {lines} lines"
    for path in [*PACKAGE.rglob("*.cpp"), *PACKAGE.rglob("*.h")]:
        assert len(path.read_text().splitlines()) <= 400, path


def test_serving_needs_neither_torchrec_nor_training():
    names = [path.relative_to(ROOT).with_suffix("") for path in sources() if box_of(path) == "serving"]
    modules = [".".join(name.parts).removesuffix(".__init__") for name in names]
    code = f"import {', '.join(modules)}, sys; print({{'torchrec', 'fuxi_torchrec.training'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr
