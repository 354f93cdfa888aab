"""Shrink a program that fails to a small one that fails in the same way."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from fuzz.programs import Body, Program, Statement

_MOST_TRIES = 400


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Returns a small program that still fails."""
    tries = 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(program):
            tries += 1
            if tries > _MOST_TRIES:
                return program
            if fails(candidate):
                program, is_smaller = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    if program.loss:
        yield without_unused(dataclasses.replace(program, loss=None))
    if len(program.results) > 1:
        half = len(program.results) // 2
        yield without_unused(dataclasses.replace(program, results=program.results[:half]))
        yield without_unused(dataclasses.replace(program, results=program.results[half:]))
    # Return earlier values, which need fewer statements.
    if len(program.results) == 1 and not program.loss:
        names = [statement.result for statement in program.statements]
        for name in names[: len(names) // 2] + names[len(names) // 2 : -1]:
            if name != program.results[0]:
                candidate = without_unused(dataclasses.replace(program, results=(name,)))
                if len(candidate.statements) < len(program.statements):
                    yield candidate
    for statements in _with_one_less(program.statements):
        yield without_unused(dataclasses.replace(program, statements=statements))
    for i, statement in enumerate(program.statements):
        for replaced in _simpler(statement):
            yield dataclasses.replace(program, statements=(*program.statements[:i], replaced, *program.statements[i + 1 :]))


def _with_one_less(statements: Sequence[Statement]) -> Iterator[tuple[Statement, ...]]:
    """Yields statements without one, or with one of its arguments in the place of its result."""
    for i in reversed(range(len(statements))):
        removed = statements[i]
        yield (*statements[:i], *statements[i + 1 :])
        for name in dict.fromkeys((*removed.arguments, "x")):
            passed_on = Statement("unary", removed.result, (name,), {"function": "identity"})
            if (removed.kind, removed.arguments) != ("unary", (name,)) or removed.parameters != passed_on.parameters:
                yield (*statements[:i], passed_on, *statements[i + 1 :])


def _simpler(statement: Statement) -> Iterator[Statement]:
    for k, body in enumerate(statement.bodies):
        for statements in _with_one_less(body.statements):
            bodies = [*statement.bodies]
            bodies[k] = dataclasses.replace(body, statements=statements)
            yield dataclasses.replace(statement, bodies=tuple(bodies))
        for i, inner in enumerate(body.statements):
            for replaced in _simpler(inner):
                bodies = [*statement.bodies]
                bodies[k] = dataclasses.replace(body, statements=(*body.statements[:i], replaced, *body.statements[i + 1 :]))
                yield dataclasses.replace(statement, bodies=tuple(bodies))


_EFFECTS = ("added to the total", "moving mean", "counted", "written to the table", "drawn", "fails", "checked")


def without_unused(program: Program) -> Program:
    """Returns the program without the statements that nothing needs. Statements with effects are kept."""
    wanted = {*program.results, *([program.loss] if program.loss else [])}
    kept: list[Statement] = []
    for statement in reversed(program.statements):
        if statement.result in wanted or _has_effects(statement):
            kept.append(statement)
            wanted |= _taken(statement)
    return dataclasses.replace(program, statements=tuple(reversed(kept)))


def _has_effects(statement: Statement) -> bool:
    return statement.kind in _EFFECTS or any(map(_has_effects, (s for body in statement.bodies for s in body.statements)))


def _taken(statement: Statement) -> set[str]:
    return {*statement.arguments, *(name for body in statement.bodies for name in _taken_by(body))}


def _taken_by(body: Body) -> set[str]:
    return {body.result}.union(*map(_taken, body.statements))
