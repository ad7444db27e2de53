"""Rules of the package: who may import whom, how large a class or a module may be, who sets whose attributes.

``KNOWN`` lists what still breaks a rule. It only shrinks: an entry that breaks no rule any more fails its test, too.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import kfac_optim
from kfac_optim.bases import records
from kfac_optim.common.machines import machine_of

PACKAGE = Path(kfac_optim.__file__).parent
TREES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
}

# From the bottom up: a module or package imports from the rows above its own alone, not from its own row.
LAYERS = (
    ("common", "spectra"),
    ("distributed", "factors", "progress", "schedules"),
    ("bases", "layers", "damping"),
    ("capture", "solvers"),
    ("snapshots",),
    ("blocks",),
    ("stacks", "sightings"),
    ("scaling",),
    ("config", "placement"),
    ("steering",),
    ("averages", "coverage", "refresh", "preconditioning"),
    ("stages",),
    ("diagnostics", "saved_state"),
    ("engine",),
    ("turning",),
    ("optimizers",),
    ("selftuning",),
    ("__init__",),
)
# Beside torch and the standard library. OPTIONAL ones are imported when they are needed, never with the package.
THIRD_PARTIES = {
    "torch_optimizer": ("bases",),
    "matplotlib": ("diagnostics.plots",),
    "horovod": ("distributed",),
    "deepspeed": ("distributed",),
}
OPTIONAL = {"matplotlib", "horovod", "deepspeed"}
MAX_METHODS, MAX_LINES, MAX_OPTIMIZER = 30, 400, 35

KNOWN: dict[str, set[str]] = {"module": set(), "class": set(), "attribute": set()}


def unit(name: str) -> str:
    """The row of LAYERS knows a module by its first name."""
    return name.partition(".")[0]


def is_in(name: str, places: tuple[str, ...]) -> bool:
    """Whether a module is one of these, or in a package that is."""
    return any(name == place or name.startswith(f"{place}.") for place in places)


def imports_of(name: str, tree: ast.AST | None = None) -> Iterator[str]:
    """Dotted names of all modules that a module imports, at its top or inside functions."""
    is_package = (PACKAGE / name.replace(".", "/") / "__init__.py").is_file() or name == "__init__"
    parts = ["kfac_optim", *(name.split(".") if name != "__init__" else [])]
    for node in ast.walk(TREES[name] if tree is None else tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = parts[: len(parts) + is_package - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix("kfac_optim.")
                yield f"kfac_optim.{inner}" if base.startswith("kfac_optim") and inner in TREES else base


def inside(name: str) -> set[str]:
    """The package's own modules among the imports of one."""
    found = {module for module in imports_of(name) if module.startswith("kfac_optim")}
    return {module.removeprefix("kfac_optim.") if module != "kfac_optim" else "__init__" for module in found}


def test_imports_go_down() -> None:
    height = {name: row for row, names in enumerate(LAYERS) for name in names}
    assert {unit(name) for name in TREES} <= set(height), "a new module or package needs its row in LAYERS"
    for name in TREES:
        for other in inside(name):
            own = unit(other) == unit(name)
            assert own or height[unit(other)] < height[unit(name)], f"{name} must not import {other}"


def test_nobody_imports_in_a_circle() -> None:
    graph = {name: inside(name) for name in TREES}
    assert set(TopologicalSorter(graph).static_order()) == set(graph)


def test_the_package_imports_torch_and_little_else() -> None:
    for name, tree in TREES.items():
        outside = {unit(module) for module in imports_of(name)} - {"kfac_optim", "torch", *sys.stdlib_module_names}
        for module in outside:
            assert is_in(name, THIRD_PARTIES.get(module, ())), f"{name} must not import {module}"
        at_once = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
        found = {unit(module) for module in imports_of(name, ast.Module(at_once, []))}
        assert not found & OPTIONAL, f"{name} imports {found & OPTIONAL} with the package"


def test_no_import_hides() -> None:
    for name, tree in TREES.items():
        called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not {f for f in called if f == "__import__" or f.startswith("importlib.")}, name


def test_only_distributed_knows_of_processes() -> None:
    for name, tree in TREES.items():
        if unit(name) == "distributed":
            continue
        dotted = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        from_torch = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "torch"]
        dotted |= {f"torch.{alias.name}" for node in from_torch for alias in node.names}
        found = [m for m in {*imports_of(name), *dotted} if m.startswith(("torch.distributed", "horovod", "deepspeed"))]
        assert not found, f"{name}: {found}"


def test_module_types_are_told_apart_in_layers_alone() -> None:
    """A type of module is an entry of the registry; ``isinstance(module, nn.Linear)`` elsewhere would be another."""
    for name, tree in TREES.items():
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)] if unit(name) != "layers" else []
        for node in calls:
            if ast.unparse(node.func) in ("isinstance", "issubclass"):
                types = [n for n in ast.walk(node.args[1]) if isinstance(n, ast.Attribute)]
                found = {n.attr for n in types if ast.unparse(n.value) == "nn"} - {"Module", "Parameter", "parameter"}
                assert not found, f"{name}, line {node.lineno}: {ast.unparse(node)}"


def test_what_a_step_records_is_touched_in_bases_alone() -> None:
    """Elsewhere ``bases.records`` is asked, so that one page tells when each entry is there."""
    keys = {name for name, value in vars(records).items() if value in records.RECORDED} | {*records.RECORDED}
    for name, tree in TREES.items():
        for node in ast.walk(tree) if unit(name) != "bases" else ():
            operands: list[ast.expr] = []
            if isinstance(node, ast.Subscript):
                operands = [node.value, node.slice]
            elif isinstance(node, ast.Compare):
                operands = [node.left, *node.comparators]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                operands = [node.func.value, *node.args]
            names = {ast.unparse(operand).rpartition(".")[2].strip("'") for operand in operands}
            assert "state" not in names or not names & keys, f"{name}, line {node.lineno}: {ast.unparse(node)}"


def test_nothing_is_read_on_the_host_layer_by_layer() -> None:
    """``.item()`` waits for the device; what has to be read is read once per step."""
    for name, tree in TREES.items():
        calls = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        assert not [call.lineno for call in calls if call.attr == "item"], name


def test_every_new_tensor_is_told_its_device() -> None:
    """Else it is on the default device, which a user may have set to a GPU: reading a number would wait for that."""
    makers = {f"torch.{name}" for name in ("tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "randn")}
    for name, tree in TREES.items():
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) in makers]
        assert not [n.lineno for n in calls if not any(k.arg == "device" for k in n.keywords)], name


def test_constants_by_kind_of_machine_have_a_value_for_each() -> None:
    kinds = set(get_args(get_type_hints(machine_of)["return"]))
    for name, tree in TREES.items():
        dicts = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
        keys = [{key.value for key in node.keys if isinstance(key, ast.Constant)} for node in dicts]
        assert all(found == kinds for found in keys if found & kinds), name


def test_no_module_is_too_long() -> None:
    long = {name for name, tree in TREES.items() if max((n.end_lineno or 0) for n in tree.body) > MAX_LINES}
    assert long == KNOWN["module"]


def test_no_class_has_too_many_methods() -> None:
    classes = [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    methods = {node.name: sum(isinstance(n, ast.FunctionDef) for n in node.body) for node in classes}
    assert {name for name, count in methods.items() if count > MAX_METHODS} == KNOWN["class"]


@pytest.mark.parametrize("name", ["KFACSGD", "KFACAdam", "KFACLAMB"])
def test_an_optimizer_is_a_thin_class(name: str) -> None:
    node = next(n for n in ast.walk(TREES["optimizers"]) if isinstance(n, ast.ClassDef) and n.name == name)
    node = copy.deepcopy(node)
    for part in ast.walk(node):
        if isinstance(part, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(part) is not None:
            part.body[0] = ast.Pass()
    assert len(ast.unparse(node).splitlines()) <= MAX_OPTIMIZER


# Attributes ----------------------------------------------------------------------------------------------------------

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
OF_TENSORS = ("grad", "_kfac_left")


def statements(function: ast.AST) -> Iterator[ast.AST]:
    """What a function does itself, without the functions and classes inside it."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield from statements(node)


def makes_an_object(node: ast.AST | None) -> bool:
    """Calls of classes, ``cls``, ``__new__`` and copies: what they return is the caller's alone."""
    called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    return called[:1].isupper() or called in ("cls", "type(self)", "__new__", "copy", "deepcopy", "replace")


def attributes_set_by_others(tree: ast.Module) -> Iterator[str]:
    """``x.a = ...`` where x is not ``self``, ``cls`` or an object just made, or a tensor, which is torch's."""
    for function in (tree, *(node for node in ast.walk(tree) if isinstance(node, FUNCTIONS))):
        nodes = list(statements(function))
        assigned = [n for n in nodes if isinstance(n, (ast.Assign, ast.AnnAssign)) and makes_an_object(n.value)]
        targets = [t for n in assigned for t in (n.targets if isinstance(n, ast.Assign) else [n.target])]
        own = {"self", "cls", *(t.id for t in targets if isinstance(t, ast.Name))}
        for node in nodes:
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and node.attr not in OF_TENSORS:
                found = node.value
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr", "object.__setattr__"):
                found = node.args[0]
            else:
                continue
            if not (isinstance(found, ast.Name) and found.id in own):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_nobody_sets_attributes_of_another_object() -> None:
    found = {name: list(attributes_set_by_others(tree)) for name, tree in TREES.items()}
    found = {name: places for name, places in found.items() if places}
    assert set(found) == KNOWN["attribute"], {name: found[name] for name in set(found) - KNOWN["attribute"]}


# Documentation -------------------------------------------------------------------------------------------------------


def members(name: str, thing: object) -> Iterator[tuple[str, object]]:
    """A public class or function, and what a class defines for its users."""
    yield name, thing
    fields = getattr(thing, "__dataclass_fields__", ())
    for member, value in vars(thing).items() if isinstance(thing, type) else ():
        if (
            not member.startswith("_")
            and member not in fields
            and (inspect.isroutine(value) or isinstance(value, property))
        ):
            yield f"{name}.{member}", getattr(thing, member)


@pytest.mark.parametrize("package", ["", ".capture", ".diagnostics", ".distributed", ".layers", ".solvers"])
def test_every_public_name_is_documented(package: str) -> None:
    module = importlib.import_module(f"kfac_optim{package}")
    assert module.__doc__
    for public in module.__all__:
        thing = getattr(module, public)
        if not (inspect.isroutine(thing) or inspect.isclass(thing)):
            continue  # a type alias; its comment stands at its definition
        for name, member in members(public, thing):
            text = (inspect.getdoc(member) or "").strip()
            assert text, f"{name} has no docstring"
            assert not text.startswith(f"{name}("), f"{name}: a dataclass writes such a docstring by itself"


def test_every_module_is_on_its_page_and_in_its_package() -> None:
    page = (PACKAGE.parent / "docs" / "modules.rst").read_text()
    shown = re.findall(r"^\.\. automodule:: kfac_optim\.([\w.]+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(TREES.keys() - {"__init__"})
    for name in shown:
        package, _, module = name.rpartition(".")
        if package:
            assert f"\n    {module}.py " in (ast.get_docstring(TREES[package]) or ""), (
                f"{package} does not say what {module} does"
            )
