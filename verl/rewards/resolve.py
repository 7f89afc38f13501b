"""From `reward.function.path` to the function: a built-in name, `file.py:name` or `package.module:name`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.errors import UserError
from verl.rewards.auto import BUILT_IN, auto, require_reasoning_gym

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What a reward function is called with, by keyword."""

SIGNATURE = "compute_score(data_source, solution_str, ground_truth, extra_info=None)"


_IMPORTERS = (__file__, importlib.__file__, "<frozen importlib")


@dataclass(frozen=True)
class FunctionSpec:
    """A reward function as the config names it; what travels to the worker processes."""

    path: str
    """`auto`, a built-in name, `file.py:name` or `package.module:name`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments added to each call."""


def resolve(spec: FunctionSpec) -> Callable[..., Any]:
    """The function that `spec` names, its kwargs applied; to be called with the four `ARGUMENTS` by keyword.

    A user's module is imported in the calling process. Raises `ValueError` that says what to mend: no such file,
    module or name, a module that raises, something that cannot be called, or not with these arguments.
    """
    function = _find(spec.path)
    _check_call(function, spec)
    return functools.partial(function, **spec.kwargs)


def _find(path: str) -> Callable[..., Any]:
    where, separator, name = path.rpartition(":")
    if not separator:
        return _built_in(path)
    if not where or not name:
        raise UserError(f"reward.function.path={path}: write file.py:name or package.module:name")
    module = _import(path, where)
    if name not in vars(module):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(
            f"reward.function.path={path}: {where} has no {name!r}; its functions are {', '.join(functions) or 'none'}"
        )
    return vars(module)[name]


def _built_in(name: str) -> Callable[..., Any]:
    if name == "auto":
        return auto
    if name.endswith(".py"):
        raise UserError(f"reward.function.path={name} names a file; add the function: {name}:compute_score")
    if name not in BUILT_IN:
        raise UserError(
            f"reward.function.path={name} is no built-in reward function; those are auto, "
            f"{', '.join(sorted(BUILT_IN))}. Your own is file.py:name or package.module:name; none is null."
        )
    if name == "reasoning_gym":
        require_reasoning_gym()
        importlib.import_module("reasoning_gym")  # takes seconds, which would count against the first sample
    return BUILT_IN[name]


def _import(path: str, where: str) -> ModuleType:
    is_file = where.endswith(".py") or "/" in where
    file = Path(where).expanduser().absolute()
    if is_file and not file.is_file():
        raise UserError(f"reward.function.path={path}: there is no file {file}")
    try:
        return _load_file(file) if is_file else importlib.import_module(where)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{where}.".startswith(f"{error.name}."):
            raise UserError(
                f"reward.function.path={path}: there is no module {error.name!r} on Python's path. "
                "Install it, start from its folder, or name the file: file.py:name."
            ) from error
        raise UserError(
            f"reward.function.path={path}: {where} raised while it was imported:\n{_from_users_code(error)}"
        ) from error


def _from_users_code(error: BaseException) -> str:
    """The traceback without the frames of this file and of the import machinery."""
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename.startswith(_IMPORTERS):
        at = at.tb_next
    return "".join(traceback.format_exception(type(error), error, at)).rstrip()


def _load_file(file: Path) -> ModuleType:
    """Runs a file as a module. Its folder goes last on Python's path: it finds its neighbours and shadows nothing."""
    name = f"verl_reward_function_{file.stem}"
    loader_spec = importlib.util.spec_from_file_location(name, file)
    if loader_spec is None or loader_spec.loader is None:
        raise ImportError(f"{file} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(loader_spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    sys.modules[name] = module  # dataclasses and pickle look their module up
    loader_spec.loader.exec_module(module)
    return module


def _check_call(function: Any, spec: FunctionSpec) -> None:
    named = f"reward.function.path={spec.path}"
    if not callable(function):
        raise UserError(f"{named} is {type(function).__name__} {function!r}, not a function")
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{named} is an async function; give a plain one, for instance with asyncio.run inside")
    taken = [name for name in spec.kwargs if name in ARGUMENTS]
    if taken:
        raise UserError(f"reward.function.kwargs holds {', '.join(taken)}, which each sample brings itself")
    try:
        signature = inspect.signature(function)
        signature.bind(**dict.fromkeys(ARGUMENTS), **spec.kwargs)
    except (TypeError, ValueError) as error:
        given = "".join(f", {name}=..." for name in spec.kwargs)
        raise UserError(
            f"{named} cannot be called as a reward function: {error}. It is called by keyword with "
            f"({', '.join(ARGUMENTS)}{given}); define it as {SIGNATURE}, and each of reward.function.kwargs as a "
            "further argument."
        ) from error
