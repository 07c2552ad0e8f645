"""The code reward on mutants of real solutions: each way to change one operator, constant or return of HumanEval's.

``RAYRFT_TEST_DATA=… python -m tests.rewards.code_on_real_problems`` prints those that pass, which HumanEval's own
checks pass, too. The folder holds HumanEval (``humaneval/problems.jsonl``).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.rewards import scored


def mutants(source: str, after: int = 0) -> Iterator[tuple[str, str]]:
    """Each way to change one operator, constant or return of a program after that line, with what was changed."""
    swaps: dict[type, type] = {
        ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
        ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Mod: ast.FloorDiv, ast.FloorDiv: ast.Mod,
        ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.In: ast.NotIn, ast.NotIn: ast.In,
    }  # fmt: skip
    count = sum(1 for _ in ast.walk(ast.parse(source)))
    for number in range(count):
        tree = ast.parse(source)
        node = list(ast.walk(tree))[number]
        line = getattr(node, "lineno", 0)
        if line <= after:
            continue
        if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in swaps:
            change, node.op = f"{type(node.op).__name__} in line {line}", swaps[type(node.op)]()
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in swaps:
            change, node.ops[0] = f"{type(node.ops[0]).__name__} in line {line}", swaps[type(node.ops[0])]()
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            change, node.value = f"{node.value} in line {line}", node.value + 1
        elif isinstance(node, ast.Return) and node.value is not None:
            change, node.value = f"return in line {line}", None
        else:
            continue
        yield change, ast.unparse(tree)


def main() -> None:
    """Try all mutants, which takes some minutes."""
    tried = passed = 0
    for row in scored.real_rows("humaneval", "problems.jsonl"):
        source = row["prompt"] + row["canonical_solution"]
        for change, mutant in mutants(source, row["prompt"].count("\n")):
            tried += 1
            if scored.result("code", "", mutant, {"test_s": 2, "budget_s": 6}, **row).value == 1.0:
                passed += 1
                print(row["task_id"], f"{change}: {source.splitlines()[int(change.split()[-1]) - 1].strip()}")
    print(f"{tried} mutants, {passed} pass")


if __name__ == "__main__":
    main()
