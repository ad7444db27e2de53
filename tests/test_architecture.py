"""The package keeps the shape of its design: who imports whom, how thin the optimizers are, who decides what."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import kfac_optim

PACKAGE = Path(kfac_optim.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [path.relative_to(PACKAGE).with_suffix("").as_posix() for path in FILES]
TREES = {name: ast.parse(path.read_text()) for name, path in zip(NAMES, FILES, strict=True)}

# The table of the design: modules of the package, then packages beside the standard library.
ALL_BELOW = {
    "layers", "capture", "factors", "solvers", "assignment", "comm", "scaling", "schedules", "diagnostics"
}  # fmt: skip
MAY_IMPORT: dict[str, tuple[set[str], set[str]]] = {
    "__init__": ({*ALL_BELOW, "curvature", "optimizers"}, set()),
    "factors": (set(), {"torch"}),
    "solvers": (set(), {"torch"}),
    "assignment": (set(), set()),
    "scaling": (set(), {"torch"}),
    "schedules": (set(), set()),
    "diagnostics": (set(), {"torch", "matplotlib"}),
    "optimizers": ({"curvature"}, {"torch", "torch_optimizer"}),
}
# Of the packages: what all of their files may import, beside torch, and which of the others each of them.
WITHIN_LAYERS: dict[str, set[str]] = {
    "moments": set(),
    "ownership": set(),
    "base": {"moments"},
    "windows": {"moments"},
    "shifts": {"moments", "windows"},
    "registry": {"base"},
    "linear": {"base", "registry"},
    "norm": {"base", "registry", "moments"},
    "convolution": {"base", "registry", "moments", "windows", "shifts"},
    "attention": {"base", "registry", "linear"},
    "__init__": {
        "moments", "ownership", "base", "windows", "shifts", "registry", "linear", "norm", "convolution", "attention"
    },
}  # fmt: skip
WITHIN_CAPTURE: dict[str, set[str]] = {
    "distributions": set(),
    "loss_terms": set(),
    "statistics": set(),
    "attention": set(),
    "compiled": {"distributions"},
    "hooks": {"distributions", "loss_terms", "statistics", "attention", "compiled"},
    "__init__": {"distributions", "loss_terms", "statistics", "hooks"},
}
WITHIN_COMM: dict[str, set[str]] = {
    "communicator": set(),
    "transports": {"communicator"},
    "joining": {"communicator"},
    "sharding": set(),
    "__init__": {"communicator", "transports", "joining", "sharding"},
}
WITHIN_CURVATURE: dict[str, set[str]] = {
    "options": set(),
    "blocks": set(),
    "memory": {"blocks"},
    "views": {"blocks"},
    "state": {"blocks"},
    "coverage": {"blocks"},
    "ranks": {"blocks"},
    "averages": {"blocks", "ranks"},
    "refresh": {"blocks", "ranks"},
    "preconditioning": {"blocks", "ranks"},
    "engine": {
        "options", "blocks", "coverage", "memory", "views", "state", "ranks", "averages", "refresh", "preconditioning"
    },
    "__init__": {"blocks", "engine"},
}  # fmt: skip
PACKAGES: dict[str, tuple[set[str], dict[str, set[str]]]] = {
    "layers": (set(), WITHIN_LAYERS),
    "capture": ({"layers"}, WITHIN_CAPTURE),
    "comm": (set(), WITHIN_COMM),
    "curvature": (ALL_BELOW, WITHIN_CURVATURE),
}
FRAMEWORKS = {"comm": {"horovod", "deepspeed"}}
MAY_IMPORT |= {
    f"{package}/{name}": (
        {*below, *(f"{package}.{other}" for other in others)},
        {"torch", *FRAMEWORKS.get(package, ())},
    )
    for package, (below, within) in PACKAGES.items()
    for name, others in within.items()
}
MAX_CODE_LINES = 40


def imports_of(name: str) -> Iterator[tuple[str, bool]]:
    """Every module that a file imports, also inside functions, and whether it is one of the package (then its path)."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ["kfac_optim", *name.split("/")][: -node.level] if node.level else []
            own = ".".join([*above, *([node.module] if node.module else [])])
            modules = [own] if node.module else [f"{own}.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            internal = module.split(".")[0] == "kfac_optim"
            yield module.removeprefix("kfac_optim.") if internal else module, internal


def test_the_files_are_those_of_the_design() -> None:
    assert sorted(NAMES) == sorted(MAY_IMPORT)


def test_nobody_imports_in_a_circle() -> None:
    graph = {name.replace("/", ".").removesuffix(".__init__"): own for name, (own, _) in MAY_IMPORT.items()}
    assert set(TopologicalSorter(graph).static_order()) == set(graph)


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_imports(name: str) -> None:
    own, others = MAY_IMPORT[name]
    found = list(imports_of(name))
    inside = {module for module, internal in found if internal}
    outside = {module.split(".")[0] for module, internal in found if not internal} - set(sys.stdlib_module_names)
    assert inside <= own, f"{name}.py must not import {inside - own}"
    assert outside <= others, f"{name}.py must not import {outside - others}"


def test_no_import_hides_from_the_table() -> None:
    for name, tree in TREES.items():
        called = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        modules = {module for module, _ in imports_of(name)}
        assert "__import__" not in called and "importlib" not in modules, name


def test_only_comm_knows_of_processes() -> None:
    for name, tree in TREES.items():
        if name.startswith("comm/"):
            continue
        assert not [m for m, _ in imports_of(name) if m.startswith(("torch.distributed", "horovod"))], name
        dotted = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not {text for text in dotted if text.startswith("torch.distributed")}, name
        names = [
            a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "torch" for a in n.names
        ]
        assert "distributed" not in names, name


def code_lines(path: Path, node: ast.ClassDef) -> int:
    """Lines of a class that hold code: no comment, no blank line, no docstring."""
    source = path.read_text()
    with_code: set[int] = set()
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in ignored:
            with_code.update(range(token.start[0], token.end[0] + 1))
    for part in ast.walk(node):
        if isinstance(part, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(part) is not None:
            with_code.difference_update(range(part.body[0].lineno, (part.body[0].end_lineno or 0) + 1))
    return len(with_code & set(range(node.lineno, (node.end_lineno or 0) + 1)))


@pytest.mark.parametrize("name", ["KFACSGD", "KFACAdam", "KFACLAMB"])
def test_an_optimizer_is_a_thin_class(name: str) -> None:
    node = next(n for n in ast.walk(TREES["optimizers"]) if isinstance(n, ast.ClassDef) and n.name == name)
    lines = code_lines(PACKAGE / "optimizers.py", node)
    assert 1 <= lines <= MAX_CODE_LINES, f"{name} has {lines} lines of code"


def test_module_types_are_told_apart_in_layers_alone() -> None:
    """A type of module is an entry of the registry; ``isinstance(module, nn.Linear)`` elsewhere would be another."""
    general = {"Module", "Parameter", "parameter"}
    for name, tree in TREES.items():
        if name.startswith("layers/"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
                types = [
                    n.attr
                    for n in ast.walk(node.args[1])
                    if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "nn"
                ]
                assert set(types) <= general, f"{name}.py, line {node.lineno}: {ast.unparse(node)}"


def test_nothing_is_read_on_the_host_layer_by_layer() -> None:
    """``.item()`` waits for the device; what has to be read is read once per step."""
    for name, tree in TREES.items():
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        assert not [n.lineno for n in calls if isinstance(n.func, ast.Attribute) and n.func.attr == "item"], name


def test_every_public_name_exists_and_is_documented() -> None:
    for name in kfac_optim.__all__:
        text = (getattr(kfac_optim, name).__doc__ or "").strip()
        assert text and not text.startswith(f"{name}("), f"{name}: a dataclass writes such a docstring by itself"
    assert isinstance(kfac_optim.__version__, str)
