"""Load a module without the compiled plain path: its classes are the Python twins of compiled classes."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

import kproxy.plain


def in_python(module: ModuleType) -> ModuleType:
    """Execute the module's file again, under another name, without the extension."""
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_in_python", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kproxy.plain, "compiled", None)
        # Its annotations name it.
        patch.setitem(sys.modules, spec.name, again)
        spec.loader.exec_module(again)
    return again
