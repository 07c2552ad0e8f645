"""The house rules that a tool can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from rayrft.runtime import ray_api
from tests.conftest import ROOT

SOURCES = sorted((ROOT / "rayrft").rglob("*.py"))

# Bottom to top: a package imports only from those before it. `rayrft/explorer` and `rayrft/trainer` stand side by side.
ORDER = [
    ["errors"],
    ["files", "markup", "registry"],
    ["json_lines"],
    ["experience"],
    ["runtime"],
    ["algorithms", "weights"],
    ["config"],
    ["data"],
    ["rewards"],
    ["pipelines"],
    ["buffer"],
    ["explorer", "trainer"],
    ["endpoint"],
    ["feedback"],
    ["monitor"],
    ["viewer"],
    ["core"],
    ["benchmark"],
    ["cli"],
    ["__main__", "__init__"],
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [("check", "."), ("format", "--check", ".")], ids=["lint", "format"])
def test_ruff_finds_nothing(arguments: tuple[str, ...]) -> None:
    result = run("ruff", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_type_checker_finds_nothing_but_wrong_calls_between_actors() -> None:
    result = run("mypy", "rayrft", "jobs", "tests/typed_calls.py")
    assert result.returncode == 0, result.stdout


def imports(path: Path) -> list[tuple[str, bool]]:
    """Modules a file imports, each with whether at module level (outside functions and TYPE_CHECKING)."""
    tree = ast.parse(path.read_text())
    late = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        found += [(name, id(node) not in late) for name in names]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_downhill(path: Path) -> None:
    part = path.relative_to(ROOT / "rayrft").parts[0].removesuffix(".py")
    for name, _ in imports(path):
        if name.startswith("rayrft."):
            other = name.split(".")[1]
            if part != "__init__" and other != part:
                assert LEVEL[other] < LEVEL[part], f"{part} imports {other}"


def test_no_modules_import_each_other() -> None:
    """Neither at module level nor inside a function. Imports for annotations alone do not count."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES
    }
    graph = dict[str, set[str]]()
    for module, path in modules.items():
        tree = ast.parse(path.read_text())
        typed = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for inner in ast.walk(node)
        }
        used = set[str]()
        for node in ast.walk(tree):
            if id(node) not in typed and isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            if id(node) not in typed and isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                used |= {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module] = used & modules.keys()
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_helpers_are_imported_from_modules_without_tests() -> None:
    tests = re.compile(r"\s*(?:from|import) tests[\w.]*\.test_|\s*from tests[\w.]* import .*\btest_")
    paths = sorted((ROOT / "tests").rglob("*.py"))
    found = [(path.name, line) for path in paths for line in path.read_text().splitlines() if tests.match(line)]
    assert not found


def test_tests_reach_for_no_more_private_names_than_before() -> None:
    """Where a seam reads naturally, it is public. A line counts that names an underscored attribute of the package."""
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    private = {name for name in names if name.startswith("_") and not name.endswith("_")}

    def reaches(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr in private and ast.unparse(node.value) not in ("self", "cls")
        if isinstance(node, ast.ImportFrom):
            return any(alias.name in private for alias in node.names)
        return isinstance(node, ast.Constant) and str(node.value).rpartition(".")[2] in private

    found = {
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if reaches(node)
    }
    assert len(found) <= 94, "\n".join(sorted(found))


def test_only_the_engine_its_plug_in_and_what_wraps_its_parsers_import_vllm() -> None:
    users = {path.name for path in SOURCES if any(name.split(".")[0] == "vllm" for name, _ in imports(path))}
    assert users == {"engine.py", "weight_plugin.py", "vllm_parsers.py"}


def test_private_modules_of_ray_are_imported_by_one_file_and_the_installed_release_has_them() -> None:
    private = re.compile(r"ray\.(.*\.)?(_|private|generated\b)")
    assert not [(path.name, name) for path in SOURCES for name, _ in imports(path) if private.match(name)]
    for name, module in ray_api.PRIVATE.items():
        assert private.match(module) and getattr(ray_api, name) is not None


def test_algorithms_are_pure_torch() -> None:
    for path in (ROOT / "rayrft" / "algorithms").glob("*.py"):
        used = {name.split(".")[0] for name, _ in imports(path)} - set(sys.stdlib_module_names)
        assert used <= {"torch", "rayrft"}, path.name


def test_importing_rayrft_and_the_coordinating_actors_needs_neither_torch_nor_ray_nor_vllm() -> None:
    code = "import rayrft.core.master, sys; print(sorted({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
