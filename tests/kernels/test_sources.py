"""Checks the sources for what Triton's interpreter runs and its compiler does not."""

import ast

import pytest

from tests.repository import ROOT

FOLDERS = (("flexmask/kernels", "*.py"), ("block_masks", "*/*kernel*.py"), ("integrations", "*/*kernel*.py"))
KERNELS = sorted(path for folder, pattern in FOLDERS for path in (ROOT / folder).glob(pattern))
WRONG = """
@kernel
def run(x):
    now = x + 1
    before = now
    while now < 5:
        before = now
        now = now + 1
    return before
"""


def lost_in_loops(source: str) -> list[str]:
    """Assignments in a kernel's loop of one variable from before it to another.

    Where both hold one value there, the compiler takes the variable to be unchanged by the loop (Triton 3.6 and 3.7).
    """
    lost = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or not any(
            "kernel" in ast.unparse(x) or "jit" in ast.unparse(x) for x in function.decorator_list
        ):
            continue
        for loop in ast.walk(function):
            if isinstance(loop, (ast.While, ast.For)):
                names = [x for x in ast.walk(function) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]
                before = {x.id for x in names if x.lineno < loop.lineno} | {x.arg for x in function.args.args}
                for node in ast.walk(loop):
                    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                        targets = {target.id for target in node.targets if isinstance(target, ast.Name)}
                        if node.value.id in before and targets & before:
                            lost.append(ast.unparse(node))
    return lost


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_no_loop_sets_a_variable_to_another_from_before_the_loop(path):
    assert not lost_in_loops(path.read_text(encoding="utf-8"))


def test_a_loop_that_sets_a_variable_to_another_from_before_is_caught():
    assert lost_in_loops(WRONG) == ["before = now"]
