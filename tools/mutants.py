"""Break the code at random and see whether the tests notice; not part of `make test`.

    python tools/mutants.py --folder .cache/mutants
    python tools/mutants.py --folder .cache/mutants --again FOLDER_OF_ANOTHER_REVISION

A mutant is the code with one small fault: a swapped comparison, a dropped statement, a number off by one, a
wrong key. The same seed makes the same mutants of the same code. Work is done in a copy of the checkout, in
three steps whose results stay in the folder, so that a run which is cut short goes on where it ended:

1. `mutants.json`: the faults, so many of each package.
2. `reach.json`: the fast tests run once over code that notes which test comes by which fault. Of compiled
   code nothing can be noted: whoever calls it counts.
3. `results.json`: for each mutant the tests that come by it, up to the first that fails: those of the package
   first, and those first that take the least time.

With `--again`, faults, and which tests found them, are taken from an earlier folder: the same faults are made
in this revision, and a fault that its finder of then still finds costs one test.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.check import Check, list_tests  # noqa: E402
from tools.structure import find_imports, parse_modules  # noqa: E402

PACKAGES = (
    "solve",
    "prove",
    "sim",
    "plan/validate",
    "routing",
    "runtime/gateway",
    "runtime/accounts",
    "control/decision",
    "fabric/registry",
    "engine",
)
# Nothing but a GPU runs these.
NOT_RUN_HERE = ("engine/triton_kernels.py", "engine/triton_ops.py")
COMPILED = frozenset({"kernel", "part", "lean_part", "entry", "njit"})
"""Decorators of functions that numba compiles."""
# Its functions are compiled by `routing.compiled`, and run plain in the gateway.
COMPILED_ELSEWHERE = "routing/decisions.py"
TESTS = ("-m", "not slow and not aic")
# A mutant may wait for ever; the tests that are tried take two minutes, on a busy machine ten.
MAX_SECONDS = 1800.0
MAX_SELECTED_CPU_S = 120.0
MAX_MEMORY_KIB = 16 * 2**20

SWAPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


@dataclass(frozen=True)
class Mutant:
    """One fault: a piece of a file, and what stands there instead; `line` counts from 1."""

    file: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    """Where `before` begins, in bytes of the file."""
    probe: int
    """Where the statement around it begins, in bytes of the file."""
    compiled: bool


def find_mutants(file: str, text: str) -> Iterator[Mutant]:
    """Yield all mutants of a file's functions."""
    data = text.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        end = starts[node.end_lineno - 1] + node.end_col_offset
        return starts[node.lineno - 1] + node.col_offset, end

    def visit(node: ast.AST, statement: int, *, inside: bool, compiled: bool) -> Iterator[Mutant]:
        if isinstance(node, ast.stmt) and not (
            isinstance(node, ast.If) and data[span(node)[0] :].startswith(b"elif")
        ):
            statement = span(node)[0]
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.AnnAssign | ast.Assert | ast.Import):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name in {"__repr__", "__str__"}:
                return
            compiled = compiled or any(_name_of(each) in COMPILED for each in node.decorator_list)
            for each in node.body:
                yield from visit(each, statement, inside=True, compiled=compiled)
            return
        for kind, after in _change(node) if inside else ():
            assert isinstance(node, ast.expr | ast.stmt)
            start, end = span(node)
            before = data[start:end].decode()
            line = node.lineno
            yield Mutant(file, line, kind, before, after, start, statement, compiled)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, statement, inside=inside, compiled=compiled)

    yield from visit(ast.parse(text), 0, inside=False, compiled=file.endswith(COMPILED_ELSEWHERE))


def _name_of(decorator: ast.expr) -> str:
    """Return the last name of a decorator, `entry` of `@compiling.entry(...)`."""
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    return decorator.id if isinstance(decorator, ast.Name) else getattr(decorator, "attr", "")


def _change(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield what else a node could be: a kind of fault, and the text."""
    if isinstance(node, ast.Compare):
        for at, operator in enumerate(node.ops):
            operators = [*node.ops]
            operators[at] = SWAPPED[type(operator)]()
            yield "comparison", ast.unparse(ast.Compare(node.left, operators, node.comparators))
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and, or", f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", f"({ast.unparse(node.operand)})"
    elif _can_be_dropped(node):
        yield "dropped", "pass"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "off by one", str(node.value + 1)
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        if isinstance(node.slice.value, str):
            wrong = ast.Constant(node.slice.value + "_")
            yield "key", ast.unparse(ast.Subscript(node.value, wrong, node.ctx))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        other_sign = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        yield "sign", f"({ast.unparse(ast.BinOp(node.left, other_sign, node.right))})"


def _can_be_dropped(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await)
    if isinstance(node, ast.Return):
        return node.value is None
    return isinstance(node, ast.AugAssign | ast.Continue | ast.Break)


def make(seed: int, each: int) -> list[Mutant]:
    """Return so many mutants of each package, kinds of faults equally likely."""
    chosen = []
    for package in PACKAGES:
        random = Random(f"{seed} {package}")
        kinds: defaultdict[str, list[Mutant]] = defaultdict(list)
        for path in sorted((ROOT / "src/atoll" / package).rglob("*.py")):
            file = str(path.relative_to(ROOT))
            if not file.endswith(NOT_RUN_HERE):
                for mutant in find_mutants(file, path.read_text("utf-8")):
                    kinds[mutant.kind].append(mutant)
        for _ in range(each):
            kind = random.choice(sorted(kinds))
            chosen.append(kinds[kind].pop(random.randrange(len(kinds[kind]))))
    return chosen


def copy_checkout(folder: Path) -> Path:
    """Copy what git knows, and what Python compiled of it, so that nothing is compiled twice."""
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    for cache in (ROOT / "src").rglob("__pycache__"):
        shutil.copytree(cache, tree / cache.relative_to(ROOT), dirs_exist_ok=True)
    # Tests look for data beside the checkout.
    shared = folder / "shared"
    if not shared.exists() and (ROOT.parent / "shared").exists():
        shared.symlink_to(ROOT.parent / "shared")
    return tree


def run_pytest(tree: Path, *options: str, seconds: float | None = None) -> tuple[int, str]:
    """Run tests of a copy; return the exit code (0 passed, 1 failed, -1 took too long) and output."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tree / "src"), str(tree)))}
    environment.pop("PYTHONPYCACHEPREFIX", None)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    # A loop that does not end may take all the memory there is.
    limited = f'ulimit -v {MAX_MEMORY_KIB}; exec "$@"'
    command = ["bash", "-c", limited, "-", sys.executable, "-m", "pytest"]
    with subprocess.Popen(
        [*command, "-q", "--assert=plain", "-p", "no:cacheprovider", *options],
        cwd=tree,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            said = "took too long"
            return -1, said
        finally:
            # What it left behind, and all of it if it hangs.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said


PROBE = '''"""Notes which test comes by which mutant: a line a pair in a file."""

import os

NAME = "MUTANTS_CURRENT"
current = os.environ.get(NAME, "")
_seen = set()
_file = os.open({path!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def hit(mutant):
    """Note that the current test came by."""
    pair = (mutant, current)
    if pair not in _seen:
        _seen.add(pair)
        os.write(_file, f"{{mutant}}\\t{{current}}\\n".encode())
'''

PLUGIN = '''"""Tells the probe which test runs; what is made for many tests counts for all who use it."""

import json
import os
import resource
import time

import mutant_probe
import pytest

_used = {{}}
_cpu_s = {{}}


def _cpu():
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _set(name):
    mutant_probe.current = os.environ[mutant_probe.NAME] = name


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    before = _cpu()
    for name in item.fixturenames:
        _used.setdefault(name, []).append(item.nodeid)
    try:
        return (yield)
    finally:
        _cpu_s[item.nodeid] = _cpu() - before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    _set("file:" + item.nodeid.partition("::")[0])
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    before = mutant_probe.current
    if fixturedef.scope != "function":
        _set("fixture:" + fixturedef.argname)
    try:
        return (yield)
    finally:
        _set(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    _set(item.nodeid)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    _set("file:" + item.nodeid.partition("::")[0])
    return (yield)


def pytest_sessionfinish():
    with open({path!r}, "a") as file:
        file.write(json.dumps({{"used": _used, "cpu_s": _cpu_s}}) + "\\n")
'''


def _insert(text: str, at: Iterable[tuple[int, int]]) -> str:
    """Write a probe for each mutant before the statement that begins at a place, in bytes."""
    data = text.encode()
    for start, number in sorted(at, reverse=True):
        indent = start - (data.rfind(b"\n", 0, start) + 1)
        # A statement behind another one or behind a colon is left alone: none is written so here.
        if data[start - indent : start].strip():
            continue
        probe = f"__import__('mutant_probe').hit({number})\n{' ' * indent}"
        data = data[:start] + probe.encode() + data[start:]
    return data.decode()


def place_probes(tree: Path, mutants: list[Mutant]) -> None:
    """Have the code of a copy note which mutants it comes by."""
    modules = parse_modules(tree / "src/atoll")
    imports = find_imports(modules)
    with_kernels = {
        name
        for name, module in modules.items()
        if any(
            _name_of(decorator) in COMPILED
            for node in ast.walk(module)
            if isinstance(node, ast.FunctionDef)
            for decorator in node.decorator_list
        )
    } | {"atoll.routing.compiled"}
    probes: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, mutant in enumerate(mutants):
        if not mutant.compiled:
            probes[mutant.file].append((mutant.probe, number))
            continue
        # Compiled code tells nothing: all functions of Python in modules that know it do.
        known = {mutant.file.removeprefix("src/").removesuffix(".py").replace("/", ".")}
        while more := {n for n in with_kernels - known if imports[n] & known}:
            known |= more
        callers = known | {name for name in modules if imports[name] & known}
        for name in callers:
            file = f"src/{name.replace('.', '/')}.py"
            path = tree / file
            if path.exists() and not file.endswith(COMPILED_ELSEWHERE):
                probes[file] += [(at, number) for at in _first_statements(path.read_text("utf-8"))]
    for file, places in probes.items():
        path = tree / file
        path.write_text(_insert(path.read_text("utf-8"), places), "utf-8")


def _first_statements(text: str) -> Iterator[int]:
    """Yield where the bodies of functions that are not compiled begin, in bytes."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not any(
            _name_of(each) in COMPILED for each in node.decorator_list
        ):
            first = next((each for each in node.body if not _is_text(each)), None)
            if first is not None and not getattr(first, "decorator_list", ()):
                yield starts[first.lineno - 1] + first.col_offset


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def find_reach(folder: Path, mutants: list[Mutant]) -> dict[str, dict[str, float]]:
    """Run all fast tests once; return the tests that come by each mutant, with their CPU seconds."""
    tree = copy_checkout(folder)
    place_probes(tree, mutants)
    hits, sessions = folder / "hits.txt", folder / "sessions.txt"
    hits.unlink(missing_ok=True)
    sessions.unlink(missing_ok=True)
    (tree / "mutant_probe.py").write_text(PROBE.format(path=str(hits)))
    (tree / "mutant_plugin.py").write_text(PLUGIN.format(path=str(sessions)))

    def run_part(check: Check) -> None:
        code, said = run_pytest(tree, "-p", "mutant_plugin", *check.command[1:])
        # Some fail for the probes: what each said stays to be read.
        (folder / f"{check.name.replace(' ', '-')}.log").write_text(said)
        print(f"{check.name}: exit code {code}", flush=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run_part, list_tests(full=False)))
    cpu_s: dict[str, float] = {}
    users: defaultdict[str, list[str]] = defaultdict(list)
    for line in sessions.read_text().splitlines():
        session = json.loads(line)
        cpu_s |= session["cpu_s"]
        for fixture, tests in session["used"].items():
            users[f"fixture:{fixture}"] += tests
    for test in cpu_s:
        users[f"file:{test.partition('::')[0]}"].append(test)
    reach: dict[str, dict[str, float]] = {str(number): {} for number in range(len(mutants))}
    for line in hits.read_text().splitlines():
        number, _, current = line.partition("\t")
        for test in users.get(current, [current]):
            if test in cpu_s:
                reach[number][test] = cpu_s[test]
    (folder / "cpu_s.json").write_text(json.dumps(cpu_s))
    return reach


def try_mutant(
    tree: Path, mutant: Mutant, tests: dict[str, float]
) -> dict[str, str | float | None]:
    """Run the tests that come by a mutant until one fails; say which."""
    started = time.perf_counter()
    path = tree / mutant.file
    original = path.read_bytes()
    before = mutant.before.encode()
    if original[mutant.start : mutant.start + len(before)] != before:
        return {"found": "no such code", "by": None}
    chosen, cpu_s = [], 0.0
    # Most are found by tests in the folder of the package.
    own = f"tests/{mutant.file.removeprefix('src/atoll/').partition('/')[0]}/"

    def order(each: tuple[str, float]) -> tuple[bool, float, str]:
        return (not each[0].startswith(own), each[1], each[0])

    for test, seconds in sorted(tests.items(), key=order):
        if cpu_s < MAX_SELECTED_CPU_S:
            chosen.append(test)
            cpu_s += seconds
    if not chosen:
        return {"found": "no", "by": None, "tests": 0}
    end = mutant.start + len(before)
    path.write_bytes(original[: mutant.start] + mutant.after.encode() + original[end:])
    listed = tree / "selected-tests.txt"
    listed.write_text("\n".join(chosen) + "\n")
    try:
        code, said = run_pytest(tree, "-x", *TESTS, f"@{listed}", seconds=MAX_SECONDS)
    finally:
        path.write_bytes(original)
    failed = [
        line.split(" ")[1] for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))
    ]
    return {
        "found": {0: "no", -1: "hangs"}.get(code, "yes"),
        "by": failed[0] if failed else None,
        "tests": len(chosen),
        "left_out": len(tests) - len(chosen),
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where results stay")
    parser.add_argument(
        "--again", type=Path, help="folder of another revision, whose mutants to try"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--each", type=int, default=15, help="mutants of a package")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    listed, reached, results = (folder / f"{n}.json" for n in ("mutants", "reach", "results"))
    if not listed.exists():
        if options.again:
            shutil.copy(options.again / "mutants.json", listed)
        else:
            made = [asdict(each) for each in make(options.seed, options.each)]
            listed.write_text(json.dumps(made, indent=1))
    mutants = [Mutant(**each) for each in json.loads(listed.read_text())]
    if not reached.exists():
        reached.write_text(json.dumps(find_reach(folder, mutants), indent=1))
    reach = json.loads(reached.read_text())
    done = json.loads(results.read_text()) if results.exists() else {}
    tree = copy_checkout(folder)
    for number, mutant in enumerate(mutants):
        key = str(number)
        if key in done:
            continue
        done[key] = try_mutant(tree, mutant, reach[key])
        results.write_text(json.dumps(done, indent=1))
        print(f"{key} {mutant.file}:{mutant.line} {mutant.kind}: {done[key]}", flush=True)
    show(mutants, done)
    return 0


def show(mutants: list[Mutant], done: dict[str, dict[str, str]]) -> None:
    """Print how many mutants of each package were found."""
    made, found = Counter[str](), Counter[str]()
    for number, mutant in enumerate(mutants):
        package = next(p for p in PACKAGES if mutant.file.startswith(f"src/atoll/{p}/"))
        made[package] += 1
        found[package] += done[str(number)]["found"] in {"yes", "hangs"}
    for package in PACKAGES:
        print(f"{package:20} {found[package]:3} of {made[package]:3}")
    print(json.dumps({"made": made.total(), "found": found.total()}))


if __name__ == "__main__":
    sys.exit(main())
