"""Find the small faults (mutants) that a module can have, and draw some of them by a seed.

A mutant is a module with one change of its syntax tree; `_Finder` defines the changes. All mutants are equally likely
to be drawn.

Left alone: docstrings and all other text, annotations, decorators, assertions, log calls, `__slots__`, code for type
checkers only, and code for people only (`__repr__`). An assignment is removed only if its target already has another
value: otherwise any test that reaches it would fail.
"""

from __future__ import annotations

import ast
import difflib
import random
from collections.abc import Sequence
from typing import Final, NamedTuple

_COMPARISONS: Final[dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_TWO_WAY: Final = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
_ARITHMETIC: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_FUNCTIONS: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
_METHODS: Final = {"add": "discard", "discard": "add"}
_LOGS: Final = frozenset({"log", "_log", "logger", "_logger", "logging", "LOG"})
_NO_BEHAVIOUR: Final = frozenset({"__slots__", "__all__", "__match_args__"})
_FOR_PEOPLE: Final = frozenset({"__repr__", "__str__"})
_FOR_TYPE_CHECKERS: Final = frozenset({"TypeVar", "NewType", "ParamSpec", "TypeVarTuple", "overload"})
# The replacement result of a function, by its annotation; None for any other annotation.
_DEFAULTS: Final = {
    "bool": ("False", "True"),
    "int": ("0",),
    "float": ("0.0",),
    "str": ("''",),
    "bytes": ("b''",),
    "list": ("[]",),
    "dict": ("{}",),
    "set": ("set()",),
    "frozenset": ("frozenset()",),
    "tuple": ("()",),
    "Sequence": ("()",),
    "Iterable": ("()",),
    "Iterator": ("iter(())",),
}


class Mutant(NamedTuple):
    """One change: the bytes of the file from `start` up to `end` become `text`."""

    path: str
    line: int
    start: int
    end: int
    operator: str
    text: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.operator}"


class _Function:
    """A function that is being walked through."""

    def __init__(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.name = node.name
        self.returns = node.returns
        self.last = node.body[-1]
        stores = (each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
        arguments = (each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg))
        self._bound: list[str] = [*stores, *arguments]

    def binds_often(self, name: str) -> bool:
        return self._bound.count(name) > 1


class _Finder(ast.NodeVisitor):
    """Finds every mutant of a module."""

    def __init__(self, path: str, source: bytes) -> None:
        self.found: list[Mutant] = []
        self._path = path
        self._source = source
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._function: _Function | None = None

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        if node.end_lineno is None or node.end_col_offset is None:
            raise ValueError(f"{self._path}: a node has no end")
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def _add(self, operator: str, node: ast.expr | ast.stmt, text: str) -> None:
        self.found.append(Mutant(self._path, node.lineno, self._start(node), self._end(node), operator, text))

    def _put(self, operator: str, node: ast.expr, other: ast.expr) -> None:
        """Replace an expression by another one."""
        self._add(operator, node, _in_parentheses(other))

    def _visit_all(self, nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    # Left alone, or in part.

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip text."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skip assertions, which narrow types."""

    def visit_arg(self, node: ast.arg) -> None:
        """Skip annotations."""

    def visit_MatchValue(self, node: ast.MatchValue) -> None:
        """Skip patterns, which take no expression in parentheses."""

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self._function = self._function, None
        is_enum = any(isinstance(base, ast.Name) and base.id in {"Enum", "Flag"} for base in node.bases)
        # The values of an Enum's members do not matter.
        self._visit_all([each for each in node.body if not (is_enum and isinstance(each, ast.Assign))])
        self._function = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._walk_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._walk_function(node)

    def _walk_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in _FOR_PEOPLE or any(_name(each) in _FOR_TYPE_CHECKERS for each in node.decorator_list):
            return
        outer, self._function = self._function, _Function(node)
        self.visit(node.args)
        self._visit_all(node.body)
        self._function = outer

    # Statements.

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(value, ast.Call) and _is_log_call(value):
            return
        if isinstance(value, ast.Call | ast.Yield | ast.YieldFrom):
            self._add("statement removed", node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(_name(target) in _NO_BEHAVIOUR for target in node.targets):
            return
        if self._function is None and isinstance(node.value, ast.Subscript):
            # A type has got a name.
            return
        if self._function is None and isinstance(node.value, ast.Tuple):
            self._drop_elements(node.value)
        if all(self._has_value_before(target) for target in node.targets):
            self._add("assignment removed", node, "pass")
        # An index on the left may be wrong too.
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is None or _name(node.annotation) == "TypeAlias":
            return
        if self._has_value_before(node.target):
            self._add("assignment removed", node, "pass")
        self.visit(node.target)
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("assignment removed", node, "pass")
        other = _ARITHMETIC.get(type(node.op))
        if other is not None:
            changed = ast.AugAssign(node.target, other(), node.value)
            self._add("arithmetic", node, ast.unparse(changed))
        self.generic_visit(node)

    def _has_value_before(self, target: ast.expr) -> bool:
        """Return whether the names of an assignment have a value at the place where it is removed."""
        if self._function is None:
            return False
        if isinstance(target, ast.Name):
            return self._function.binds_often(target.id)
        if isinstance(target, ast.Tuple):
            return all(self._has_value_before(each) for each in target.elts)
        return isinstance(target, ast.Attribute | ast.Subscript) and self._function.name != "__init__"

    def visit_Delete(self, node: ast.Delete) -> None:
        self._add("statement removed", node, "pass")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add("statement removed", node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add("loop control", node, "break")
        self._add("loop control", node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._add("loop control", node, "continue")
        self._add("loop control", node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        function = self._function
        if function is not None and node is not function.last:
            self._add("early return removed", node, "pass")
        if node.value is None:
            return
        if not _is_bare(node.value):
            for default in _defaults(function.returns if function is not None else None):
                self._add("bare default returned", node, f"return {default}")
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if _name(node.test) == "TYPE_CHECKING":
            self._visit_all(node.orelse)
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._add("loop skipped", node.iter, "()")
        if isinstance(node.iter, ast.Tuple):
            self._drop_elements(node.iter)
        self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if isinstance(node.type, ast.Tuple):
            self._drop_elements(node.type)
        self._visit_all(node.body)

    def visit_match_case(self, node: ast.match_case) -> None:
        if node.guard is not None:
            self._negate(node.guard)
            self.visit(node.guard)
        self._visit_all(node.body)

    # Expressions.

    def visit_Compare(self, node: ast.Compare) -> None:
        for place, operator in enumerate(node.ops):
            for other in _COMPARISONS[type(operator)]:
                ops = [*node.ops[:place], other(), *node.ops[place + 1 :]]
                self._put("comparison", node, ast.Compare(node.left, ops, node.comparators))
            container = node.comparators[place]
            if isinstance(operator, ast.In | ast.NotIn) and isinstance(container, ast.Tuple):
                self._drop_elements(container)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._put("and/or", node, ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))
        for place in range(len(node.values)):
            rest = [*node.values[:place], *node.values[place + 1 :]]
            self._put("operand dropped", node, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._put("not dropped", node, node.operand)
        elif isinstance(node.op, ast.USub):
            self._put("sign dropped", node, node.operand)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = _ARITHMETIC.get(type(node.op))
        if other is not None:
            self._put("arithmetic", node, ast.BinOp(node.left, other(), node.right))
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._negate(condition)
        if isinstance(node.iter, ast.Tuple):
            self._drop_elements(node.iter)
        self.visit(node.iter)
        self._visit_all(node.ifs)

    def _negate(self, test: ast.expr) -> None:
        """Negate `test`, unless a comparison's other operator or a dropped `not` makes the same change."""
        is_two_way = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], _TWO_WAY)
        is_not = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        if not (is_two_way or is_not or isinstance(test, ast.Constant)):
            self._put("condition negated", test, ast.UnaryOp(ast.Not(), test))

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._put("constant", node, ast.Constant(not node.value))
        elif isinstance(node.value, int | float):
            for step in (1, -1):
                self._put("constant", node, ast.Constant(node.value + step))

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node.func)
        if name in _FOR_TYPE_CHECKERS:
            return
        if isinstance(node.func, ast.Name) and name in _FUNCTIONS:
            self._add("function", node.func, _FUNCTIONS[name])
        if isinstance(node.func, ast.Attribute) and name in _METHODS:
            other = ast.Attribute(node.func.value, _METHODS[name])
            self._add("method", node.func, ast.unparse(other))
        if name == "isinstance" and isinstance(node.args[1], ast.Tuple):
            self._drop_elements(node.args[1])
        arguments = node.args[1:] if name == "cast" else node.args
        self._visit_all([node.func, *arguments, *(each.value for each in node.keywords)])

    def visit_Subscript(self, node: ast.Subscript) -> None:
        part = node.slice
        if isinstance(part, ast.Slice):
            for lower, upper in ((None, part.upper), (part.lower, None)):
                if (lower, upper) != (part.lower, part.upper):
                    bare = ast.Subscript(node.value, ast.Slice(lower, upper, part.step), node.ctx)
                    self._add("slice", node, ast.unparse(bare))
        self.generic_visit(node)

    def visit_List(self, node: ast.List) -> None:
        if isinstance(node.ctx, ast.Load):
            self._drop_elements(node)
        self.generic_visit(node)

    def visit_Set(self, node: ast.Set) -> None:
        self._drop_elements(node)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for place, (key, value) in enumerate(zip(node.keys, node.values, strict=True)):
            keys = [*node.keys[:place], *node.keys[place + 1 :]]
            values = [*node.values[:place], *node.values[place + 1 :]]
            self._drop("element dropped", node, key or value, ast.Dict(keys, values))
        self.generic_visit(node)

    def _drop_elements(self, node: ast.List | ast.Set | ast.Tuple) -> None:
        for place, element in enumerate(node.elts):
            rest = [*node.elts[:place], *node.elts[place + 1 :]]
            other: ast.expr = ast.Tuple(rest, node.ctx) if isinstance(node, ast.Tuple) else type(node)(elts=rest)
            self._drop("element dropped", node, element, other)

    def _drop(self, operator: str, node: ast.expr, element: ast.expr, other: ast.expr) -> None:
        """Replace the whole by `other`, at the line of the element that it lacks."""
        start, end = self._start(node), self._end(node)
        self.found.append(Mutant(self._path, element.lineno, start, end, operator, _in_parentheses(other)))


def _name(node: ast.expr) -> str:
    """Return the last part of a dotted name; empty for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _in_parentheses(node: ast.expr) -> str:
    """Return an expression's text, in parentheses if its surroundings bind more closely than its own operators."""
    text = ast.unparse(node)
    is_closed = isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict | ast.Name) or text.isdigit()
    return text if is_closed else f"({text})"


def _is_bare(node: ast.expr) -> bool:
    """Return whether it is a default or a truth value, which has a mutant of its own."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool) or not node.value
    return isinstance(node, ast.Tuple | ast.List) and not node.elts


def _is_log_call(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and _name(call.func.value) in _LOGS


def _defaults(returns: ast.expr | None) -> Sequence[str]:
    kind = returns.value if isinstance(returns, ast.Subscript) else returns
    return _DEFAULTS.get(_name(kind), ("None",)) if kind is not None else ("None",)


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Return every mutant of one module, in the order of the file."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda mutant: mutant[2:])


def draw(sources: dict[str, bytes], count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants of these modules, or all that there are, drawn by a seed.

    Each one has a syntax tree that neither its module nor another of them has.
    """
    pool = [mutant for path in sorted(sources) for mutant in mutants_of(path, sources[path])]
    random.Random(seed).shuffle(pool)  # noqa: S311 -- nothing secret
    seen = {_shape(path, source) for path, source in sources.items()}
    drawn: list[Mutant] = []
    for mutant in pool:
        if len(drawn) == count:
            break
        shape = _shape(mutant.path, mutant.apply(sources[mutant.path]))
        if shape not in seen:
            seen.add(shape)
            drawn.append(mutant)
    return drawn


def _shape(path: str, source: bytes) -> tuple[str, str]:
    return path, ast.dump(ast.parse(source))


def diff(mutant: Mutant, source: bytes) -> str:
    """Return the mutant as a unified diff that `--patch` takes."""
    before, after = (text.decode().splitlines(keepends=True) for text in (source, mutant.apply(source)))
    return "".join(difflib.unified_diff(before, after, f"a/{mutant.path}", f"b/{mutant.path}"))
