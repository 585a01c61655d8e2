"""Classes of your own by name, ``package.module:Class`` or ``path/to/file.py:Class``, and the consent to import them.

Importing a module runs its code. The rule is one for networks, heads and data: what you name yourself is imported;
what a file names, a model or a run directory or a study, is imported only where you say that you trust it, or where
your program has imported that module already.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from dropmax.errors import InvalidType, InvalidValue, RunError, did_you_mean

__all__ = ["check_import", "import_class", "import_name", "load_module", "locate", "plain_name"]

_Class = TypeVar("_Class")


def import_class(what: str, name: str, base: type[_Class]) -> type[_Class]:
    """Import ``package.module:Class`` or ``file.py:Class``; only classes that derive from ``base`` pass."""
    module_name, _, class_name = name.rpartition(":")
    parts = [class_name] if module_name.endswith(".py") else [*module_name.split("."), class_name]
    if not all(part.isidentifier() for part in parts):
        raise InvalidValue(
            f"cannot read {what} {name!r}: name your own as package.module:ClassName or file.py:ClassName"
        )
    module = load_module(what, name)
    if not hasattr(module, class_name):
        hint = did_you_mean(class_name, vars(module))
        raise InvalidValue(f"{what} {name!r}: module {module_name!r} has no {class_name!r};{hint or ' check the name'}")
    found = getattr(module, class_name)
    if not (isinstance(found, type) and issubclass(found, base)):
        where = "torch.nn.Module" if base.__name__ == "Module" else f"dropmax.{base.__name__}"
        raise InvalidType(f"{what} {name!r} must be a class deriving from {where}, got {found!r}")
    return found


def load_module(what: str, name: str) -> ModuleType:
    """Import the module of ``package.module:name`` or ``file.py:name``; if that fails, quote its error."""
    module, _, attribute = name.rpartition(":")
    try:
        return _import_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    except FileNotFoundError as error:
        if error.filename is not None:  # of the module's own doing
            raise InvalidValue(f"{what} {name!r}: importing {module} failed ({_last_line(error)})") from error
        raise InvalidValue(f"{what} {name!r}: there is no file {module}") from None
    except ModuleNotFoundError as error:
        # The module itself or a package above it is missing, or else something that it imports.
        missing = error.name or module
        if module == missing or module.startswith(missing + "."):
            file = f"{module.replace('.', '/')}.py"
            near = f" Its file is here: name it ./{file}:{attribute}" if Path(file).is_file() else ""
            advice = f"is it installed, or its folder on PYTHONPATH?{near}"
        else:
            advice = f"{module} imports it: install it"
        raise InvalidValue(f"{what} {name!r}: there is no module {missing!r}; {advice}") from error
    except Exception as error:
        raise InvalidValue(f"{what} {name!r}: importing {module} failed ({_last_line(error)})") from error


def check_import(what: str, name: str, source: str, trust_code: bool) -> None:
    """Raise where making ``name`` would import a module only because the file ``source`` says so.

    >>> check_import("network", "lenet", "model.safetensors", trust_code=False)
    >>> check_import("head", "stranger:Head", "model.safetensors", trust_code=False)
    Traceback (most recent call last):
    dropmax.errors.RunError: model.safetensors would import the head 'stranger:Head', which is not part of dropmax: ...
    """
    if ":" in name and not trust_code and sys.modules.get(_module_name(name.rpartition(":")[0])) is None:
        raise RunError(
            f"{source} would import the {what} {name!r}, which is not part of dropmax: if you trust that module, "
            f"pass trust_code=True (on the command line --trust-{what}), or import it first"
        )


def locate(name: str, folder: Path | None = None) -> str:
    """Return the name with the path of its file made absolute, so that it is found from any directory.

    >>> locate("mine.heads:Focal"), locate("heads.py:Focal").endswith("/heads.py:Focal")
    ('mine.heads:Focal', True)
    """
    file, colon, attribute = name.rpartition(":")
    if not (colon and file.endswith(".py")):
        return name
    return f"{(folder or Path()).joinpath(Path(file).expanduser()).absolute()}:{attribute}"


def plain_name(name: str) -> str:
    """Return a name that can name a file or the row of a table.

    >>> plain_name("softmax"), plain_name("mine.heads:Focal"), plain_name("../code/heads.py:Focal")
    ('softmax', 'mine.heads.Focal', 'heads.Focal')
    """
    module, colon, attribute = name.rpartition(":")
    return f"{Path(module).stem if module.endswith('.py') else module}.{attribute}" if colon else name


def import_name(cls: type) -> str | None:
    """Return the name by which another process can import a class; None for one inside a function or a notebook."""
    module = sys.modules.get(cls.__module__)
    if not cls.__qualname__.isidentifier() or getattr(module, cls.__qualname__, None) is not cls:
        return None
    if cls.__module__ == "__main__" or cls.__module__.startswith(_PREFIX):
        file = getattr(module, "__file__", None)
        return f"{Path(file).absolute()}:{cls.__qualname__}" if file and file.endswith(".py") else None
    return f"{cls.__module__}:{cls.__qualname__}"


#: A file that was named by its path is a module of this name, with its path's digest behind.
_PREFIX = "dropmax_file_"


def _module_name(module: str) -> str:
    """Return the name a module has in ``sys.modules``; that of a file follows from its path."""
    if not module.endswith(".py"):
        return module
    path = Path(module).expanduser().resolve()
    running = getattr(sys.modules.get("__main__"), "__file__", None)
    if running and Path(running).resolve() == path:
        return "__main__"  # the script that runs is never run again
    return f"{_PREFIX}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"


def _import_file(path: Path) -> ModuleType:
    """Import a file as a module of its own, once; what lies beside it can be imported by it."""
    name, path = _module_name(str(path)), path.expanduser().resolve()
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise FileNotFoundError(str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module


def _last_line(error: Exception) -> str:
    """Return where and how importing failed, as the last lines of its traceback say."""
    frames = traceback.extract_tb(error.__traceback__)
    place: tuple[Any, Any] = (frames[-1].filename, frames[-1].lineno) if frames else (None, None)
    if isinstance(error, SyntaxError):
        place = error.filename, error.lineno
    said = next((line for line in str(error.msg if isinstance(error, SyntaxError) else error).splitlines()), "")
    where = f"{Path(place[0]).name}, line {place[1]}: " if place[0] else ""
    return f"{where}{type(error).__name__}{': ' * bool(said)}{said}"
