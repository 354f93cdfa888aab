"""Shrink a program that fails to a small one that fails in the same way."""

import dataclasses

from fuzz.programs import Statement

_MOST_TRIES = 400
_EFFECTS = ("added to the total", "moving mean", "counted", "written to the table", "drawn", "fails", "checked")


def shrink(program, fails):
    """Returns a small program that still fails, as a function of a program says."""
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


def _smaller(program):
    if program.loss:
        yield without_unused(program, loss=None)
    if len(program.results) > 1:
        half = len(program.results) // 2
        yield without_unused(program, results=program.results[:half])
        yield without_unused(program, results=program.results[half:])
    # Return earlier values, which need fewer statements.
    if len(program.results) == 1 and not program.loss:
        for statement in program.statements[:-1]:
            candidate = without_unused(program, results=(statement.result,))
            if len(candidate.statements) < len(program.statements):
                yield candidate
    for statements in _with_one_less(program.statements):
        yield without_unused(program, statements=statements)
    for statements in _with_a_simpler_one(program.statements):
        yield dataclasses.replace(program, statements=statements)


def _with_one_less(statements):
    """Yields statements without one, or with one of its arguments in the place of its result."""
    for i in reversed(range(len(statements))):
        removed = statements[i]
        yield (*statements[:i], *statements[i + 1 :])
        for name in dict.fromkeys((*removed.arguments, "x")):
            passed_on = Statement("unary", removed.result, (name,), {"function": "identity"})
            if removed != passed_on:
                yield (*statements[:i], passed_on, *statements[i + 1 :])


def _with_a_simpler_one(statements):
    """Yields statements, one of which has a simpler body."""
    for i, statement in enumerate(statements):
        for k, body in enumerate(statement.bodies):
            for inner in (*_with_one_less(body.statements), *_with_a_simpler_one(body.statements)):
                bodies = (*statement.bodies[:k], dataclasses.replace(body, statements=inner), *statement.bodies[k + 1 :])
                yield (*statements[:i], dataclasses.replace(statement, bodies=bodies), *statements[i + 1 :])


def without_unused(program, **changes):
    """Returns the changed program without the statements that nothing needs. Statements with effects are kept."""
    program = dataclasses.replace(program, **changes)
    wanted = {*program.results, *([program.loss] if program.loss else [])}
    kept = []
    for statement in reversed(program.statements):
        if statement.result in wanted or _has_effects(statement):
            kept.append(statement)
            wanted |= _taken(statement)
    return dataclasses.replace(program, statements=tuple(reversed(kept)))


def _has_effects(statement):
    return statement.kind in _EFFECTS or any(map(_has_effects, (s for body in statement.bodies for s in body.statements)))


def _taken(statement):
    names = {*statement.arguments, *(body.result for body in statement.bodies)}
    return names.union(*(_taken(inner) for body in statement.bodies for inner in body.statements))
