"""`--filter`: a condition on columns, written as in Python, as an expression of pyarrow. Nothing is evaluated here."""

import ast
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scoremode.errors import CorpusError

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: lambda left, right: left < right,
    ast.LtE: lambda left, right: left <= right,
    ast.Gt: lambda left, right: left > right,
    ast.GtE: lambda left, right: left >= right,
    ast.Eq: lambda left, right: left == right,
    ast.NotEq: lambda left, right: left != right,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    # pyarrow divides whole numbers as C does.
    ast.Div: lambda left, right: left.cast(pa.float64()) / right,
}
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "len": lambda operand: pc.utf8_length(operand),
    "abs": lambda operand: pc.abs(operand),
}


def parse_filter(text: str) -> pc.Expression:
    """The expression for a condition such as `bits_per_byte < 1.2 and language == "en"`.

    There are names of columns, `a.b` for a field of a struct, `column("any name")`, numbers, texts, True, False,
    comparisons, `in`, `is None`, `and`, `or`, `not`, `+ - * /`, `len` of a text and `abs`. As in SQL, what is compared
    with null is null, and a row is kept where the condition is true.

    Raises:
        CorpusError: it is anything else.
    """
    try:
        expression = _expression(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, pa.ArrowException) as error:
        raise CorpusError(f"--filter {text!r} is no condition: {error}") from error
    if not isinstance(expression, pc.Expression):
        raise CorpusError(f"--filter {text!r} is no condition")
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
        case ast.Name() | ast.Attribute():
            return pc.field(*_path(node))
        case ast.Call(func=ast.Name(id="column"), args=[ast.Constant(value=str() as name)], keywords=[]):
            return pc.field(name)
        case ast.Call(func=ast.Name(id=name), args=[operand], keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](_expression(operand))
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            return ~_expression(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return pc.negate(_expression(operand))
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _expression(left) & _expression(right)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _expression(left) | _expression(right)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC:
            return _ARITHMETIC[type(operator)](_expression(left), _expression(right))
        case ast.BoolOp(op=operator, values=[first, *others]):
            return _joined(_expression(first), others, all_of=isinstance(operator, ast.And))
        case ast.Compare(left=left, ops=operators, comparators=operands):
            return _comparison(left, operators, operands)
    raise ValueError(f"{ast.unparse(node)!r} is not understood")


def _path(node: ast.expr) -> list[str]:
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=struct, attr=name):
            return [*_path(struct), name]
    raise ValueError(f"{ast.unparse(node)!r} is not understood")


def _joined(expression: Any, others: list[ast.expr], *, all_of: bool) -> Any:
    for node in others:
        expression = expression & _expression(node) if all_of else expression | _expression(node)
    return expression


def _comparison(left: ast.expr, operators: list[ast.cmpop], operands: list[ast.expr]) -> Any:
    """Python's chains too: `1 < a < 2`."""
    whole = None
    for operator, right in zip(operators, operands, strict=True):
        part = _compared(_expression(left), operator, right)
        whole = part if whole is None else whole & part
        left = right
    return whole


def _compared(left: Any, operator: ast.cmpop, right: ast.expr) -> Any:
    match operator, right:
        case ast.Is(), ast.Constant(value=None):
            return left.is_null()
        case ast.IsNot(), ast.Constant(value=None):
            return left.is_valid()
        case ast.In() | ast.NotIn(), ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            found = left.isin([ast.literal_eval(element) for element in elements])
            return found if isinstance(operator, ast.In) else ~found
    if type(operator) not in _COMPARISONS:
        raise ValueError(f"{ast.unparse(right)!r} cannot be compared in this way")
    return _COMPARISONS[type(operator)](left, _expression(right))
