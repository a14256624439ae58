"""Links functions that numba compiled to IR only (parts) into the functions that Python calls (entries).

Use it through `core.compiling`, which loads it for the versions of numba in `TESTED`; any other compiles in
its own way: slower, same results. It subclasses numba's code library, compiler and cache. Before `TESTED` is
widened, `tests/core/test_compiling.py` must pass: it says what has to hold of them.

CPU seconds of compiling what a first plan and a first simulation need (numba 0.68; on shared cores, each
taken once, so read the order rather than the digits):

    as it is                                             12.3   7.7
    parts with numba's own passes                        13.4  11.4
    without remembered types, quiet events, paused gc    17.4  14.6
    without all of these                                 18.7  18.4

`python -m benchmarks.first_run` holds both figures to a bar.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any

from numba import njit, types
from numba.core import event
from numba.core.caching import FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompilerBase
from numba.core.compiler_machinery import PassManager, _pass_registry, register_pass
from numba.core.environment import lookup_environment
from numba.core.errors import TypingError, termcolor
from numba.core.interpreter import (
    Interpreter,
    peep_hole_delete_with_exit,
    peep_hole_fuse_dict_add_updates,
)
from numba.core.ir_utils import build_definitions
from numba.core.ssa import reconstruct_ssa
from numba.core.transforms import canonicalize_cfg
from numba.core.typed_passes import (
    AnnotateTypes,
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.untyped_passes import (
    FixupArgs,
    ReconstructSSA,
    TranslateByteCode,
)

from atoll.core.waiting import say


class PartLibrary(JITCodeLibrary):  # type: ignore[misc]
    """The IR of a function that only compiled code calls: neither optimised nor made into machine code."""

    def add_ir_module(self, ir_module: Any) -> None:
        """Take in IR, unless it is there for Python or C to call."""
        if ir_module.name not in ("wrapper", "cfunc_wrapper"):
            super().add_ir_module(ir_module)

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        """Close the library; what it calls is linked where all of it is."""
        self._raise_if_finalized()
        for library in self._linking_libraries:
            self._reload_init.update(library._reload_init)
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, _name: str) -> int:
        """Return no address: there is no machine code."""
        self._ensure_finalized()
        return 0

    def own_module(self) -> Any:
        """Return the IR of this function alone, to be linked any number of times."""
        return super()._get_module_for_linking()

    def _get_module_for_linking(self) -> Any:
        # For a function that was not compiled here and calls what was.
        whole = self.own_module().clone()
        for library in needed_by(self)[1:]:
            whole.link_in(_module_of(library), preserve=True)
        return whole


class EntryLibrary(JITCodeLibrary):  # type: ignore[misc]
    """A function that Python calls, with all parts it is made of."""

    def finalize(self) -> None:
        """Link every part once and optimise the whole."""
        self._raise_if_finalized()
        for library in needed_by(self)[1:]:
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(_module_of(library), preserve=True)
        self._optimize_final_module()
        self._final_module.verify()
        self._finalize_final_module()


def needed_by(library: Any) -> list[Any]:
    """Return a library and all that it needs, each once."""
    # A dict keeps the order in which they were found; a set does not.
    seen = {library: None}
    waiting = [library]
    while waiting:
        for one in waiting.pop()._linking_libraries:
            if one not in seen:
                seen[one] = None
                if isinstance(one, PartLibrary):
                    waiting.append(one)
    return list(seen)


def _module_of(library: Any) -> Any:
    if isinstance(library, PartLibrary):
        return library.own_module()
    return library._get_module_for_linking()


class PartInterpreter(Interpreter):  # type: ignore[misc]
    """Makes numba's IR of bytecode, without looking for `with` and for unpacked dictionaries."""

    def post_process(self, peepholes: Any, func_ir: Any) -> Any:
        """Return the IR after those steps that matter to parts."""
        for one in peepholes:
            if one not in (peep_hole_delete_with_exit, peep_hole_fuse_dict_add_updates):
                func_ir = one(func_ir)
        return func_ir


@register_pass(mutates_CFG=True, analysis_only=False)
class PartTranslation(TranslateByteCode):  # type: ignore[misc]
    """Makes numba's IR of bytecode."""

    _name = "part_translation"

    def run_pass(self, state: Any) -> bool:
        """Make the IR, its blocks in order."""
        func_ir = PartInterpreter(state.func_id).interpret(state.bc)
        func_ir.blocks = canonicalize_cfg(func_ir.blocks)
        state.func_ir = func_ir
        return True


@register_pass(mutates_CFG=False, analysis_only=False)
class PartSSA(ReconstructSSA):  # type: ignore[misc]
    """Gives every assignment a variable of its own, without asking how long each lives."""

    _name = "part_ssa"

    def run_pass(self, state: Any) -> bool:
        """Change the IR."""
        state.func_ir = reconstruct_ssa(state.func_ir)
        self._patch_locals(state)
        state.func_ir._definitions = build_definitions(state.func_ir.blocks)
        return True


@register_pass(mutates_CFG=False, analysis_only=False)
class PartStripPhis(PreLowerStripPhis):  # type: ignore[misc]
    """Takes the phi nodes out again, without asking how long variables live."""

    _name = "part_strip_phis"

    def run_pass(self, state: Any) -> bool:
        """Change the IR."""
        state.func_ir = self._strip_phi_nodes(state.func_ir)
        state.func_ir._definitions = build_definitions(state.func_ir.blocks)
        return True


@register_pass(mutates_CFG=False, analysis_only=True)
class PartLegalization(IRLegalization):  # type: ignore[misc]
    """Says where variables end, which matters only where arrays that numba counts are among them."""

    _name = "part_legalization"

    def run_pass(self, state: Any) -> bool:
        """Leave the IR as it is if all variables are numbers and pointers."""
        models = state.targetctx.data_model_manager
        if any(models[kind].contains_nrt_meminfo() for kind in set(state.typemap.values())):
            return bool(super().run_pass(state))
        return False


class PartPasses(PassManager):  # type: ignore[misc]
    """Runs the passes of a part, untimed and unchecked."""

    def run(self, state: Any) -> None:
        """Run all of them."""
        for one, _ in self.passes:
            _pass_registry.get(one).pass_inst.run_pass(state)


class PartCompiler(CompilerBase):  # type: ignore[misc]
    """Compiles a part: without numba's passes for closures, array expressions and parallel loops."""

    def define_pipelines(self) -> list[Any]:
        """Return what is done, in order."""
        passes = PartPasses("part")
        for one in (
            PartTranslation,
            FixupArgs,
            PartSSA,
            NopythonTypeInference,
            PartStripPhis,
            PartLegalization,
            AnnotateTypes,
            NativeLowering,
            NoPythonBackend,
        ):
            passes.add_pass(one, one._name)
        passes.finalize()
        return [passes]


class EntryCompiler(Compiler):  # type: ignore[misc]
    """Compiles a function that Python calls; whatever it calls becomes a part."""

    def compile_extra(self, func: Callable[..., Any]) -> Any:
        """Compile the function and all it calls."""
        codegen = self.state.targetctx.codegen()
        if codegen._library_class is PartLibrary:
            raise TypeError(f"{func.__qualname__} is an entry: compiled code may call parts only")
        library = self.state.library = EntryLibrary(codegen, func.__qualname__)
        library.enable_object_caching()
        say(f"compiling {known_as(func)}, once on this machine")
        typing, target = self.state.typingctx, self.state.targetctx
        with (
            _quietly(),
            _operators_remembered(),
            # What numba brings along was loaded when this compiler was made.
            _replaced(target, "load_additional_registries", partial(_install_new, target)),
            _replaced(codegen, "_library_class", PartLibrary),
            # A part has no place in memory that could point to its environment.
            _replaced(codegen, "set_env", _nothing),
            _replaced(typing, "resolve_function_type", _remember(typing.resolve_function_type)),
            _replaced(typing, "resolve_getattr", _remember_attributes(typing.resolve_getattr)),
            # Numba colours a message at every instruction, for errors that hardly ever come.
            _replaced(termcolor(), "_markup", _plainly),
            _no_garbage(),
        ):
            made = super().compile_extra(func)
        # Parts had no place for their environments (`set_env`, above): in the linked module they have.
        for variable in library._final_module.global_variables:
            environment = lookup_environment(variable.name)
            if environment is not None:
                codegen.set_env(variable.name, environment)
        return made


def _plainly(message: str, *_args: Any, **_kws: Any) -> str:
    """Return a message as it is."""
    return message


def _nothing(*_args: Any, **_kws: Any) -> None:
    """Do nothing."""


def _install_new(target: Any) -> None:
    """Install what came since: numba puts intrinsics into whichever registry it finds first."""
    for registry in list(target._registries):
        target.install_registry(registry)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object another attribute meanwhile; whoever compiles holds the lock of numba's compiler."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        # It was set on the object: without it, that of the class is back.
        delattr(owner, name)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Collect no garbage meanwhile: compiling makes millions of objects and drops few of them."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Nor look at them ever after: the last collection, when Python ends, took half a second.
        gc.freeze()
        if collects:
            gc.enable()


@contextmanager
def _changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give a module or a class another attribute meanwhile; see `_replaced`."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


@contextmanager
def _quietly() -> Iterator[None]:
    """Tell nobody of locks and passes meanwhile: with parts inside parts, all of them are told of each."""
    with (
        _changed(event, "start_event", _nothing),
        _changed(event, "end_event", _nothing),
        _changed(event, "install_timer", lambda *_args: nullcontext()),
    ):
        yield


_TYPES: dict[Any, Any] = {}
_CALLS: dict[Any, Any] = {}


@contextmanager
def _operators_remembered() -> Iterator[None]:
    """Find types of operators once; numba asks again, with constants, when it makes code of them."""
    plain = types.Function.get_call_type

    def once(self: Any, context: Any, args: Any, kws: Any) -> Any:
        if kws:
            return plain(self, context, args, kws)
        key = self, args
        known = _CALLS.get(key)
        if known is None:
            try:
                known = plain(self, context, args, kws)
            except TypingError as error:
                # Failures are remembered, too.
                known = error
            _CALLS[key] = known
        if isinstance(known, TypingError):
            raise known
        return known

    with _changed(types.Function, "get_call_type", once):
        yield


def _remember_attributes(resolve: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Find the types of the fields of records and of what modules have only once."""

    def resolve_once(kind: Any, name: str) -> Any:
        key = kind, name
        known = _TYPES.get(key)
        if known is None:
            known = resolve(kind, name)
            if known is not None:
                _TYPES[key] = known
        return known

    return resolve_once


def _remember(resolve: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Find the types of operators and built-in functions only once.

    Numba asks dozens of candidates for the type of each `a[i]` and each `a + b`, every time anew.
    """

    def resolve_once(func: Any, args: Any, kws: Any) -> Any:
        if kws or not isinstance(func, types.Function | BuiltinFunctionType | type):
            return resolve(func, args, kws)
        key = func, tuple(args)
        known = _TYPES.get(key)
        if known is None:
            known = resolve(func, args, kws)
            if known is not None:
                _TYPES[key] = known
        return known

    return resolve_once


def _widen(kind: Any) -> Any:
    """The type that an argument of a part has: no literal, and whole numbers of one width."""
    kind = types.unliteral(kind)
    if isinstance(kind, types.Integer) and kind.signed:
        return types.int64
    return kind


def link_part(function: Callable[..., Any]) -> Any:
    """Return a function that only compiled functions call."""
    made = njit(
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
        error_model="numpy",
        pipeline_class=PartCompiler,
    )(function)
    call_template = made.get_call_template
    templates: dict[Any, Any] = {}

    def template(args: Any, kws: Any) -> Any:
        wide = tuple(map(_widen, args))
        if kws:
            return call_template(wide, {name: _widen(kind) for name, kind in kws.items()})
        if wide not in templates:
            templates[wide] = call_template(wide, {})
        return templates[wide]

    def add(compiled: Any) -> None:
        made.overloads[tuple(compiled.signature.args)] = compiled

    def refuse(*_args: Any, **_kws: Any) -> Any:
        raise TypeError(f"{function.__qualname__} is a part: only compiled code calls it")

    made.get_call_template = template
    # Numba would let Python call it, at address 0.
    made.add_overload = add
    made._compile_for_args = refuse
    return made


class EntryCache(FunctionCache):  # type: ignore[misc]
    """Compiled entries on disk, known by the text of all they are made of.

    Numba looks at the file of the entry alone; parts may be in others.
    """

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), digest_of(self._py_func))


def digest_of(function: Any) -> str:
    """Return a digest of all source files in the folders that a function and its parts come from."""
    # Whatever changes in this module changes what is made of the sources.
    files = {Path(__file__)}
    for folder in {Path(one.__code__.co_filename).parent for one in _reached_from(function)}:
        files.update(folder.glob("*.py"))
    text = hashlib.sha256()
    # Sorted, as the order of a set is not the same in every process.
    for file in sorted(files):
        text.update(file.read_bytes())
    return text.hexdigest()


def _reached_from(function: Any) -> set[Any]:
    """A function and all compiled functions that it calls, at whatever depth."""
    seen = {function}
    waiting = [function]
    while waiting:
        one = waiting.pop()
        known = one.__globals__
        for name in one.__code__.co_names:
            value = known.get(name)
            # `module.function` has both names in it.
            inside = vars(value).values() if isinstance(value, ModuleType) else (value,)
            for called in inside:
                plain = getattr(called, "py_func", None)
                if plain is not None and plain not in seen:
                    seen.add(plain)
                    waiting.append(plain)
    return seen


def link_entry(function: Callable[..., Any]) -> Any:
    """Return a function for Python to call, linked with all parts that it needs, and cached."""
    made = njit(
        nogil=True,
        no_cfunc_wrapper=True,
        error_model="numpy",
        pipeline_class=EntryCompiler,
    )(function)
    # Where nothing can be written, neither beside the source nor at home, there is no cache.
    with suppress(RuntimeError):
        made._cache = EntryCache(made.py_func)
    return made


def is_cached(dispatcher: Any, arguments: tuple[Any, ...]) -> bool:
    """Return whether an entry for these types is in the cache, as its sources are now."""
    cache = dispatcher._cache
    if not isinstance(cache, EntryCache):
        return False
    key = cache._index_key(arguments, dispatcher.targetctx.codegen())
    return key in cache._cache_file._load_index()


def known_as(function: Any) -> str:
    """Return what people know a compiled function as: what its module calls `COMPILED_AS`."""
    return str(function.__globals__.get("COMPILED_AS", function.__module__))
