"""Small changes to a module's source that a good test notices: which there are, and how to make one.

A mutant is a source with one change: an operator or comparison swapped, a number moved, a condition or a sign turned
round, a call such as ``.detach()`` dropped, ``min`` for ``max``, a statement deleted, another value returned.
Docstrings, messages of errors, annotations and ``__all__`` are left alone.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.MatMult: ast.Mult,
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
#: Methods and functions that stand for each other's opposite.
SWAPS = {
    "min": "max",
    "max": "min",
    "amin": "amax",
    "amax": "amin",
    "minimum": "maximum",
    "maximum": "minimum",
    "clamp_min": "clamp_max",
    "clamp_max": "clamp_min",
    "clamp_min_": "clamp_max_",
    "clamp_max_": "clamp_min_",
    "add_": "sub_",
    "sub_": "add_",
    "mul_": "div_",
    "div_": "mul_",
    "exp": "expm1",
    "log": "log1p",
    "sum": "mean",
    "mean": "sum",
    "any": "all",
    "all": "any",
    "ceil": "floor",
    "floor": "ceil",
    "zeros_like": "ones_like",
    "ones_like": "zeros_like",
    "new_zeros": "new_ones",
    "new_ones": "new_zeros",
}
#: Methods that may be left out: what they are called on stays.
DROPS = {
    "detach", "clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "neg", "neg_", "abs", "abs_",
    "exp", "exp_", "log", "log_", "sigmoid", "sigmoid_", "sqrt", "square", "ceil_", "floor", "to", "float", "double",
    "mean", "scatter", "scatter_", "scatter_add_", "masked_fill", "nan_to_num_", "mul_", "div_", "add_", "sub_",
    "addcmul_", "addcmul", "softmax", "items", "contiguous", "clone", "expand",
}  # fmt: skip
#: Calls whose arguments are words for a reader, or for torch: nothing in them is a formula.
WORDS = {
    "warn",
    "check_choice",
    "check_count",
    "check_flag",
    "check_weight",
    "check_positive",
    "check_probability",
    "check_finite",
    "_finite",
    "custom_op",
    "operator",
    "register_buffer",
}


class Mutant(NamedTuple):
    """One change, in a line of a file."""

    position: int  # among the mutants of this source
    line: int
    before: str
    after: str
    tree: ast.Module
    place: ast.AST
    changed: ast.AST

    def source(self) -> str:
        """Return the whole module, changed."""
        return ast.unparse(_Replace(self.place, self.changed).visit(self.tree))


def fingerprint(source: str) -> str:
    """Name a source by what it says: a verdict holds for it and for no other."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def mutants(source: str) -> list[Mutant]:
    """Return every mutant of a module."""
    tree = ast.parse(source)
    found: list[Mutant] = []
    for place, changed in _changes(tree):
        before = ast.unparse(place)
        if isinstance(place, ast.stmt):
            before = before.splitlines()[0]
        after = ast.unparse(changed)
        if isinstance(changed, ast.stmt):
            after = after.splitlines()[0]
        if before != after:
            line: int = getattr(place, "lineno", 0)
            found.append(Mutant(len(found), line, before, after, tree, place, changed))
    return found


class _Replace(ast.NodeTransformer):
    """Copy a tree with one node replaced; what is not above it is shared."""

    def __init__(self, place: ast.AST, changed: ast.AST) -> None:
        self.place, self.changed = place, changed

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if node is self.place:
            return self.changed
        result = copy.copy(node)
        for name, old in ast.iter_fields(node):
            if isinstance(old, list):
                setattr(result, name, [self.visit(x) if isinstance(x, ast.AST) else x for x in old])
            elif isinstance(old, ast.AST):
                setattr(result, name, self.visit(old))
        return result


def _changes(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST]]:
    for node in _code(tree):
        yield from ((node, changed) for changed in _changed(node))


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Walk over what computes: no docstrings, no messages, no annotations, no lists of names."""
    if isinstance(node, ast.Raise) or _is_docstring(node) or _is_list_of_names(node):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Call) and _name(node.func) in WORDS:
        return
    yield node
    if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):  # -1 is one number, not two
        return
    for name, child in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for each in child if isinstance(child, list) else [child]:
            if isinstance(each, ast.AST):
                yield from _code(each)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_list_of_names(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _changed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in place of a node."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in ARITHMETIC:
        if not (isinstance(node, ast.BinOp) and _is_text(node.left)):
            yield _with(node, op=ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.Compare):
        yield _with(node, ops=[COMPARISONS[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not, ast.Invert)):
        # -1 is mostly a dimension, and 1 would be the same one of a matrix.
        yield ast.Constant(0) if ast.unparse(node) == "-1" else node.operand
    elif isinstance(node, ast.Constant):
        yield from _numbers(node)
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        if not isinstance(node.test, ast.UnaryOp):
            yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Call):
        yield from _calls(node)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield from _returns(node)
    if isinstance(node, (ast.AugAssign, ast.Expr, ast.Break)) or _assigns_a_part(node):
        yield ast.copy_location(ast.Pass(), node)


def _assigns_a_part(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _numbers(node: ast.Constant) -> Iterator[ast.AST]:
    value = node.value
    if isinstance(value, bool):
        yield _with(node, value=not value)
    elif isinstance(value, int):
        yield _with(node, value=value + 1)
        if value > 0:
            yield _with(node, value=value - 1)
    elif isinstance(value, float):
        yield _with(node, value=value * 2 if value else 1.0)


def _calls(node: ast.Call) -> Iterator[ast.AST]:
    name = _name(node.func)
    last = name.rsplit(".", 1)[-1]
    if last in SWAPS:
        function = ast.Name(SWAPS[last], ast.Load())
        if isinstance(node.func, ast.Attribute):
            function = _with(node.func, attr=SWAPS[last])  # type: ignore[assignment]
        yield _with(node, func=function)
    of_module = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in ("torch", "F", "math", "np")
    if last in DROPS and isinstance(node.func, ast.Attribute) and not of_module:
        yield node.func.value
    elif last in DROPS and of_module and node.args:
        yield node.args[0]


def _returns(node: ast.Return) -> Iterator[ast.AST]:
    value = node.value
    if isinstance(value, ast.Tuple) and len(value.elts) == 2 and not isinstance(value.elts[1], ast.Starred):
        yield _with(node, value=_with(value, elts=value.elts[::-1]))
    elif isinstance(value, ast.Constant) and value.value is None:
        return
    elif not isinstance(value, (ast.Constant, ast.Tuple)):
        yield _with(node, value=ast.Constant(None))
