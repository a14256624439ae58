"""Find import circles and class names that mean two things; part of `make test`.

    python tools/structure.py

Every import counts, also one inside a function or under TYPE_CHECKING: a circle that only the type checker
sees still means that neither module can be read, moved or tested without the other.
"""

from __future__ import annotations

import argparse
import ast
import gc
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The same thing on two floors that must not know each other.
ALIKE = {
    "Hop": "a node with its layers on a request's way, in plans and on the wire of the engine",
    "Receiver": "whom the parts of an answer are told, over HTTP and through the tunnel",
}

Imports = dict[str, set[str]]


def parse_modules(package: Path) -> dict[str, ast.Module]:
    """Parse every module of a package; keys are dotted names."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = ast.parse(path.read_text("utf-8"), str(path))
    return modules


def walk_statements(tree: ast.Module) -> Iterator[ast.stmt | ast.ExceptHandler | ast.match_case]:
    """Yield all statements of a module, those inside others too; imports and classes are such.

    Expressions, which most of a tree consists of, are left out.
    """
    waiting: list[ast.stmt | ast.ExceptHandler | ast.match_case] = [*tree.body]
    while waiting:
        node = waiting.pop()
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, block, ())


Names = list[tuple[str, str]]
"""What a module imports, as written: `from a import b` is ("a", "b"), `import a` is ("a", "")."""


def list_names(tree: ast.Module) -> Names:
    """Return what a module imports, anywhere in it."""
    names: Names = []
    for node in walk_statements(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [(alias.name, "") for alias in node.names]
    return names


def resolve_names(names: Mapping[str, Names]) -> Imports:
    """Return for every module which others of `names` it imports.

    `from package import name` is the module `package.name` where there is one, else the package itself.
    That importing a module also runs the packages above it is left out: every package whose `__init__`
    imports from inside would be a circle.
    """
    found: Imports = {}
    for module, asked in names.items():
        inside = ((f"{package}.{name}", package) for package, name in asked)
        found[module] = {one if one in names else package for one, package in inside}
        found[module] = (found[module] & names.keys()) - {module}
    return found


def find_imports(modules: Mapping[str, ast.Module]) -> Imports:
    """Return for every module which others of `modules` it imports, anywhere in it."""
    return resolve_names({module: list_names(tree) for module, tree in modules.items()})


def find_circles(imports: Imports) -> list[list[str]]:
    """Return the groups of modules that import each other, each group in order of names.

    Tarjan's strongly connected components, with the recursion unrolled: `low[v]` is the lowest
    order of a module still on the stack that `v` reaches.
    """
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []
    for root in sorted(imports):
        if root in order:
            continue
        order[root] = low[root] = len(order)
        stack.append(root)
        path: list[tuple[str, Iterator[str]]] = [(root, iter(sorted(imports[root])))]
        while path:
            module, rest = path[-1]
            for other in rest:
                if other not in order:
                    order[other] = low[other] = len(order)
                    stack.append(other)
                    path.append((other, iter(sorted(imports[other]))))
                    break
                if other in stack:
                    low[module] = min(low[module], order[other])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[module])
                if low[module] == order[module]:
                    at = stack.index(module)
                    circle, stack[at:] = sorted(stack[at:]), []
                    if len(circle) > 1:
                        circles.append(circle)
    return circles


def find_shared_names(modules: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Return the names that two classes or more have, with the modules they are in."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module, tree in modules.items():
        for node in walk_statements(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    return {name: places[name] for name in sorted(places) if len(places[name]) > 1}


def find_problems(package: Path, alike: Mapping[str, str]) -> list[str]:
    """Return one line for every circle and every class name that needs another one."""
    modules = parse_modules(package)
    imports = find_imports(modules)
    lines = []
    for circle in find_circles(imports):
        members = set(circle)
        lines.append(f"import circle of {len(circle)} modules:")
        lines += [f"  {a} -> {b}" for a in circle for b in sorted(imports[a] & members)]
    shared = find_shared_names(modules)
    lines += [
        f"class name {name} is taken {len(places)} times: {', '.join(places)}"
        for name, places in shared.items()
        if name not in alike
    ]
    lines += [
        f"class name {name} is allowed twice, but is not there" for name in alike.keys() - shared
    ]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("package", nargs="?", type=Path, default=ROOT / "src" / "atoll")
    lines = find_problems(parser.parse_args().package, ALIKE)
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    gc.disable()  # trees are all there is, and all of them are kept: looking for garbage takes half the time
    sys.exit(main())
