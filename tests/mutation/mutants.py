"""Draw mutants: copies of a module with one small fault."""

import dataclasses
import random
from collections import defaultdict

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.plugins import get_operator, operator_names

# These make mutants that fail at once, such as types that Python refuses, or that are the same program.
_LEFT_OUT = ("BitOr", "_Is", "ExceptionReplacer", "RemoveDecorator", "Variable")


class _Condition(Operator):
    """Replaces a condition, or a part of it, with a constant: a guard is forgotten, or always holds."""

    constant = ""

    @classmethod
    def examples(cls):
        return (Example("if a: b", f"if {cls.constant}: b"), Example("a and b", f"a and {cls.constant}", occurrence=1))

    def mutation_positions(self, node):
        for i in self._conditions(node):
            yield node.children[i].start_pos, node.children[i].end_pos

    def mutate(self, node, index):
        node.children[list(self._conditions(node))[index]] = parso.parse(f" {self.constant}")
        return node

    @staticmethod
    def _conditions(node):
        """Yields the children of a node that are conditions."""
        if node.type == "if_stmt":
            yield from (i + 1 for i, child in enumerate(node.children) if child.get_code().strip() in ("if", "elif"))
        elif node.type == "test":  # a if b else c
            yield 2
        elif node.type in ("and_test", "or_test"):
            yield from range(0, len(node.children), 2)
        elif node.type == "comp_if":
            yield 1


class AlwaysHolds(_Condition):
    constant = "True"


class NeverHolds(_Condition):
    constant = "False"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A module with one fault."""

    path: str  # of the module, from the root of the repository
    line: int  # the number of the line with the fault
    operator: str  # the kind of the fault
    before: str  # this line without the fault
    after: str
    code: str  # the source of the module with the fault

    def __str__(self):
        return f"{self.path}:{self.line} {self.operator}: {self.before} -> {self.after}"


def draw_mutants(root, modules, count, seed):
    """Draws places in the modules, all with the same probability, and a fault for each. Larger samples begin alike."""
    operators = {name: get_operator(name)() for name in operator_names() if not any(part in name for part in _LEFT_OUT)}
    operators |= {kind.__name__: kind() for kind in (AlwaysHolds, NeverHolds)}
    codes = {path: path.read_text() for path in modules}
    faults = defaultdict(list)
    for path, code in codes.items():
        lines, nodes = code.splitlines(), list(ast_nodes(get_ast(code)))
        for name, operator in operators.items():
            positions = [position for node in nodes for position in operator.mutation_positions(node)]
            for occurrence, position in enumerate(positions):
                (line, column), _ = position
                # Tests of equal lengths hold by themselves.
                if not lines[line - 1][:column].endswith("strict="):
                    faults[path, position].append((name, occurrence))
    places = sorted(faults)
    random.Random(seed).shuffle(places)
    for path, position in places[:count]:
        name, occurrence = random.Random(f"{seed} {position}").choice(faults[path, position])
        code, line = codes[path], position[0][0]
        mutated = mutate_code(code, operators[name], occurrence)
        before, after = (text.splitlines()[line - 1].strip() for text in (code, mutated))
        yield Mutant(str(path.relative_to(root)), line, name, before, after, mutated)
