"""Keep what a forward may change outside of its model, and put it back: auxiliary losses, counts, caches, generators.

Which functions a forward calls is seen while it runs: a profile function is told of each call before it begins. Then
the variables that the function names are kept: of its own file, and of other files by way of their modules. What they
hold is followed down to plain values. A forward that reaches what cannot be put back is stopped there with a Complaint.

Other threads may work meanwhile. So a variable, an attribute or a closure is bound back only if code that ran has an
instruction which binds that name. Contents of containers are put back if they changed; who changed them is not known.

Of torch, NumPy and Python itself nothing is kept but random numbers, which is done by the look.
"""

from __future__ import annotations

import contextvars
import dis
import sys
import threading
from collections.abc import Callable, Iterable, MutableMapping, Set
from functools import lru_cache
from types import CodeType, FrameType, ModuleType
from typing import Any

from holter.kept import MISSING, Kept, Names, is_cache, is_foreign
from holter.problems import Complaint

_BINDS = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_DEREF", "DELETE_DEREF"}
_BINDING = frozenset(dis.opmap[name] for name in _BINDS)
# A function that names one of these may bind names that its instructions do not say.
_BINDS_ANY = {"setattr", "delattr", "vars", "__dict__", "__setattr__", "__delattr__"}
_STARTS_THREAD = threading.Thread.start.__code__


class _Stop(BaseException):
    """Ends a forward; not an Exception, which the forward might handle, and go on."""


class Surroundings:
    """What is outside of a model while its forward runs. `held` is what the model holds and shares with its twin."""

    def __init__(self, held: Iterable[Any]) -> None:
        self._kept = Kept()
        self._codes: dict[int, CodeType] = {}  # that ran, by id
        self._files: dict[int, Names] = {}  # their variables that may be bound anew, by the id of the file's dictionary
        self._modules: dict[int, dict[str, Any]] = {}  # variables of modules that were named
        self._names, self._bound = set[str](), set[str]()  # in the code that ran
        self._binds_any = False
        self._refusal = ""
        for one in held:
            if isinstance(one, ModuleType):
                self._add_module(one)
            else:
                self._kept.add_shared(one)

    def run(self, forward: Callable[[], Any]) -> None:
        """Run it and put back what it changed. Context variables that it sets are those of a copied context."""
        if sys.getprofile() is not None:
            raise Complaint("a profiler is at work, in the place of what sees its calls")
        try:
            sys.setprofile(self._see)
            contextvars.copy_context().run(forward)
        except _Stop:
            pass
        finally:
            sys.setprofile(None)
            self.put_back()
        if self._refusal:
            raise Complaint(self._refusal)

    def put_back(self) -> None:
        self._kept.put_back(None if self._binds_any else self._bound)
        for file in self._files.values():
            file.put_back(set(file.before))

    def _see(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        try:
            if id(code) not in self._codes:
                self._codes[id(code)] = code
                self._enter(code, frame.f_globals)
            self._kept.enter(frame)
        except Complaint as complaint:
            self._refusal = str(complaint)
            raise _Stop from None

    def _enter(self, code: CodeType, file: dict[str, Any]) -> None:
        """Keep what a function names, before it runs for the first time."""
        if code is _STARTS_THREAD:
            raise Complaint("its forward starts a thread, and what that changes outside of it cannot be put back")
        variables, attributes = _bound_by(code)
        is_own = not is_foreign(file.get("__name__"))
        self._bound |= attributes
        if not is_own:
            return
        names = set(code.co_names)
        for name in file if "globals" in names else variables:
            self._keep_binding(file, name)
        binds_any = not self._binds_any and not names.isdisjoint(_BINDS_ANY)
        self._binds_any |= binds_any
        for name in names & file.keys():
            self._reach(file, name)
        for name in names:
            self._add_imported(name, str(file.get("__package__") or ""))
        new = names - self._names
        self._names |= names
        for module in list(self._modules.values()):
            self._reach_in_module(module, new, module.keys() if binds_any else attributes)

    def _reach(self, file: dict[str, Any], name: str) -> None:
        value = file.get(name)
        if is_cache(value):
            self._kept.replace_caches(file, name)
        elif isinstance(value, ModuleType):
            self._add_module(value)
        else:
            self._kept.add(value)

    def _add_imported(self, name: str, package: str) -> None:
        """A function may import by itself, relative to its package too."""
        while True:
            module = sys.modules.get(f"{package}.{name}" if package else name)
            if isinstance(module, ModuleType):
                self._add_module(module)
            if not package:
                return
            package = package.rpartition(".")[0]

    def _add_module(self, module: ModuleType) -> None:
        file = vars(module)
        if id(file) not in self._modules and not is_foreign(module.__name__):
            self._modules[id(file)] = file
            self._reach_in_module(file, self._names, file.keys() if self._binds_any else self._bound & self._names)

    def _reach_in_module(self, file: dict[str, Any], names: Set[str], bound: Set[str]) -> None:
        """Which function reaches which module is not known: each name is looked up in each of them."""
        for name in bound:
            self._keep_binding(file, name)
        for name in names & file.keys():
            self._reach(file, name)

    def _keep_binding(self, file: MutableMapping[str, Any], name: str) -> None:
        kept = self._files.setdefault(id(file), Names(file, {}))
        kept.before.setdefault(name, file.get(name, MISSING))


@lru_cache(maxsize=8192)
def _bound_by(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the variables of its file that a function binds, and the attributes and variables of closures."""
    if _BINDING.isdisjoint(code.co_code[::2]):  # disassembling takes long
        return frozenset(), frozenset()
    found = [(one.opname, str(one.argval)) for one in dis.get_instructions(code) if one.opcode in _BINDING]
    variables = frozenset(name for operation, name in found if operation.endswith("GLOBAL"))
    return variables, frozenset(name for _, name in found) - variables
