"""`--filter`: a condition on columns, written as in Python, as an expression of pyarrow. Nothing is evaluated here."""

import ast
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scoremode.errors import CorpusError

_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.And: operator.and_,
    ast.Or: operator.or_,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    # pyarrow divides whole numbers as C does.
    ast.Div: lambda left, right: left.cast(pa.float64()) / right,
}
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {"len": pc.utf8_length, "abs": pc.abs}


def parse_filter(text: str) -> pc.Expression:
    """The expression for a condition such as `bits_per_byte < 1.2 and language == "en"`.

    There are names of columns, `a.b` for a field of a struct, `column("any name")`, numbers, texts, True, False,
    comparisons, `in`, `is None`, `and`, `or`, `not`, `+ - * /`, `len` of a text and `abs`. As in SQL, what is compared
    with null is null, and a row is kept where the condition is true. CorpusError if it has anything else.
    """
    try:
        expression = _expression(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, pa.ArrowException) as error:
        raise CorpusError(f"--filter {text!r} is not a condition: {error}") from error
    if not isinstance(expression, pc.Expression):
        raise CorpusError(f"--filter {text!r} is not a condition")
    return expression


def check_filter(expression: pc.Expression, schema: pa.Schema) -> None:
    """Refuse a condition on columns that a file lacks, or that cannot be compared."""
    try:
        schema.empty_table().filter(expression)
    except (pa.ArrowException, TypeError) as error:
        raise CorpusError(f"--filter does not fit: {' '.join(str(error).split())}") from error


def _expression(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return pc.scalar(value)
        case ast.Name() | ast.Attribute() if all(map(str.isidentifier, path := ast.unparse(node).split("."))):
            return pc.field(*path)
        case ast.Call(func=ast.Name(id="column"), args=[ast.Constant(value=str() as name)], keywords=[]):
            return pc.field(name)
        case ast.Call(func=ast.Name(id=name), args=[operand], keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](_expression(operand))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return ~_expression(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return pc.negate(_expression(operand))
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_expression(left), _expression(right))
        case ast.BoolOp(op=kind, values=values):
            return reduce(_OPERATORS[type(kind)], map(_expression, values))
        case ast.Compare(left=left, ops=kinds, comparators=operands):
            # Python's chains too: `1 < a < 2`.
            pairs = zip(kinds, [left, *operands], operands, strict=False)
            return reduce(operator.and_, (_compared(_expression(one), kind, other) for kind, one, other in pairs))
    raise ValueError(f"{ast.unparse(node)!r} is not understood")


def _compared(left: Any, kind: ast.cmpop, right: ast.expr) -> Any:
    match kind, right:
        case ast.Is(), ast.Constant(value=None):
            return left.is_null()
        case ast.IsNot(), ast.Constant(value=None):
            return left.is_valid()
        case ast.In() | ast.NotIn(), ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            found = left.isin([ast.literal_eval(element) for element in elements])
            return found if isinstance(kind, ast.In) else ~found
    if type(kind) not in _OPERATORS:
        raise ValueError(f"{ast.unparse(right)!r} cannot be compared in this way")
    return _OPERATORS[type(kind)](left, _expression(right))
