"""The tree is the design: imports go one way, the README names every file, files are short, data is no code.

Every gate is a pure function that returns its faults as sentences. Each is held to the package, and then to a
small planted package that breaks it.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent

# Left of the waist lives torch. Every module not named here (or below a name here) is on the reading side:
# a new file is held to the stricter rule until someone decides otherwise in this tuple.
TORCH_SIDE = (
    "holter.alone",
    "holter.watching",
    "holter.monitor",
    "holter.guarded",
    "holter.settings",
    "holter.training_info",
    "holter.selection",
    "holter.hooks",
    "holter.capture",
    "holter.clearing",
    "holter.clipping",
    "holter.gradient_reads",
    "holter.collector",
    "holter.logged",
    "holter.batch",
    "holter.cadence",
    "holter.samples",
    "holter.updates",
    "holter.update_roles",
    "holter.weight_role",
    "holter.training_steps",
    "holter.listener",
    "holter.loss_scaler",
    "holter.replays",
    "holter.optimizers",
    "holter.imitations",
    "holter.spending",
    "holter.measuring",
    "holter.optimizer_state",
    "holter.modules",
    "holter.execution",
    "holter.activations",
    "holter.activation_roles",
    "holter.compiled_calls",
    "holter.eager_look",
    "holter.sampling",
    "holter.twin",
    "holter.surroundings",
    "holter.kept",
    "holter.attention",
    "holter.layer_roles",
    "holter.machine",
    "holter.collectives",
    "holter.loader_workers",
    "holter.stages",
    "holter.statistics.activation",
    "holter.statistics.measure",
    "holter.statistics.content",
    "holter.statistics.device_rows",
    "holter.statistics.torch_rows",
    "holter.statistics.cpu_rows",
    "holter.statistics.triton_rows",
    "holter.statistics.triton_kernels",
    "holter.statistics.sketch",
    "holter.statistics.triton_sketch",
    "holter.statistics.sketch_kernels",
    "holter.draft",
    "holter.transfer",
    "holter.writer",
    "holter.ranks",
    "holter.gradients",
    "holter.plots",
    "holter.remedies",
    "holter.training",
    "holter.demo",
    "holter.demo_model",
    "holter.demo_fault",
    "holter.demo_remedies",
    "holter.incident",
    "holter.integrations",
    "holter.clinic",
)
# The doors: they offer both sides, and so may import the left one, but only when it is asked for.
DOORS = ("holter", "holter.cli", "holter.cli_clinic")

LIGHT = {
    "torch",
    "matplotlib",
    "pandas",
    "pyarrow",
    "click",
    "rich",
    "wandb",
    "tensorboard",
    "mlflow",
    "trackio",
    "apprise",
    "transformers",
    "accelerate",
    "lightning",
    "plotly",
    "jinja2",
    "starlette",
    "uvicorn",
    "anyio",
}  # what `import holter` leaves alone
FILE_LINES, FUNCTION_LINES = 400, 45

CODE_MODULES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CODE_NAMES = {"eval", "exec", "torch.load", "pandas.read_pickle"}
CODE_NAMES |= {f"yaml.{name}" for name in ("load", "load_all", "full_load", "unsafe_load")}

Sources = Mapping[str, str]  # path below the repository root, e.g. "holter/record.py" -> its text


class Import(NamedTuple):
    target: str
    eager: bool  # runs when the module is imported; not inside a function, nor under TYPE_CHECKING


def read_sources(root: Path) -> dict[str, str]:
    files = sorted((root / "holter").rglob("*.py"))
    return {file.relative_to(root).as_posix(): file.read_text("utf-8") for file in files}


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def under(module: str, names: Iterable[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def reading_side(sources: Sources) -> dict[str, str]:
    return {path: text for path, text in sources.items() if not under(module_name(path), TORCH_SIDE)}


def statements(node: ast.AST, eager: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below `node`, with whether it runs at import."""
    for child in ast.iter_child_nodes(node):
        deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and child in node.body:
            deferred = deferred or ast.unparse(node.test).endswith("TYPE_CHECKING")
        yield child, eager and not deferred
        yield from statements(child, eager and not deferred)


def imports(path: str, text: str) -> Iterator[Import]:
    package = path.rsplit("/", 1)[0].replace("/", ".").split(".")
    for node, eager in statements(ast.parse(text, path)):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, eager) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*parent, *filter(None, [node.module])])
            yield from (Import(f"{origin}.{alias.name}", eager) for alias in node.names)


def prefixes(dotted: str) -> list[str]:
    parts = dotted.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def import_graph(sources: Sources) -> dict[str, set[Import]]:
    """Module -> what it imports: modules of the package in full, others by their first name.

    Importing a.b.c runs a and a.b too, so parents are edges as well: also those of the module itself.
    """
    names = {module_name(path) for path in sources}
    graph: dict[str, set[Import]] = {}
    for path, text in sources.items():
        module = module_name(path)
        edges = graph[module] = {Import(name, True) for name in prefixes(module)[:-1]}
        for target, eager in imports(path, text):
            known = [name for name in prefixes(target) if name in names]
            edges |= {Import(name, eager) for name in known or prefixes(target)[:1]}
    return graph


def torch_faults(sources: Sources) -> list[str]:
    """Chains by which importing a module of the reading side imports torch."""
    graph = import_graph(sources)

    def chain(module: str, seen: set[str]) -> list[str] | None:
        if module == "torch":
            return [module]
        seen.add(module)
        for target in sorted(edge.target for edge in graph.get(module, ()) if edge.eager):
            rest = chain(target, seen) if target not in seen else None
            if rest:
                return [module, *rest]
        return None

    found = (chain(module_name(path), set()) for path in reading_side(sources))
    return [" -> ".join(path) for path in found if path]


def direction_faults(sources: Sources) -> list[str]:
    """Imports, eager or not, from the reading side into the torch side; a door may, when asked."""
    graph = import_graph(sources)
    return [
        f"{module} imports {edge.target}"
        for module in sorted(map(module_name, reading_side(sources)))
        for edge in sorted(graph[module])
        if under(edge.target, TORCH_SIDE) and (edge.eager or module not in DOORS)
    ]


def loading_faults(modules: Iterable[str], banned: Iterable[str], root: Path) -> list[str]:
    """Those of `banned` that a fresh interpreter holds after importing `modules`: what no parser sees."""
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return sorted(set(banned) & set(done.stdout.split()))


def tree_of(readme: str) -> dict[str, str]:
    """Path -> its words, from the fenced block of the README whose first line is `holter/`."""
    block = re.search(r"^```[^\n]*\n(holter/.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert block, "the README has no fenced block that starts with a line `holter/`"
    tree: dict[str, str] = {}
    parents: list[str] = []
    for line in filter(str.strip, block[1].splitlines()):
        name, _, words = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2
        parents = [*parents[:depth], name]
        tree["".join(parents)] = words.strip()
    return tree


def tree_faults(readme: str, files: Iterable[str]) -> list[str]:
    """A directory's line speaks for its `__init__.py`, except at the top, where the public names live."""
    tree, present = tree_of(readme), set(files)
    folders = {f"{parent}/" for file in present for parent in prefixes_of_path(file)}
    implied = {f"{folder}__init__.py" for folder in folders if folder != "holter/"}
    missing = [f"{path} has no line" for path in (present | folders) - implied - set(tree)]
    stale = [f"{path} does not exist" for path in set(tree) - present - folders]
    silent = [f"{path} has no words" for path, words in tree.items() if not words and path != "holter/"]
    return sorted(missing + stale + silent)


def prefixes_of_path(file: str) -> list[str]:
    return [parent.as_posix() for parent in Path(file).parents if parent.name]


def package_files(root: Path) -> list[str]:
    files = (file for file in (root / "holter").rglob("*") if file.is_file())
    names = (file.relative_to(root).as_posix() for file in files)
    return [name for name in names if not re.search(r"(^|/)(\.|__pycache__/)", name)]


def size_faults(sources: Sources) -> list[str]:
    faults = []
    for path, text in sources.items():
        if (lines := len(text.splitlines())) > FILE_LINES:
            faults.append(f"{path} has {lines} lines, more than {FILE_LINES}")
        for node in ast.walk(ast.parse(text, path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    faults.append(f"{path}: {node.name} has {lines} lines, more than {FUNCTION_LINES}")
    return faults


def code_faults(sources: Sources) -> list[str]:
    """Where the reading side could run what it reads."""
    return [
        f"{path}:{line} uses {name}"
        for path, text in reading_side(sources).items()
        for line, name in names_used(ast.parse(text, path))
        if name in CODE_NAMES | {"allow_pickle"} or name.split(".")[0] in CODE_MODULES
    ]


def names_used(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that is imported, mentioned or passed by keyword, aliases resolved."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = f"{node.module}." if isinstance(node, ast.ImportFrom) and not node.level else ""
            for alias in node.names:
                aliases[alias.asname or alias.name] = origin + alias.name
                yield node.lineno, origin + alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            first, dot, rest = ast.unparse(node).partition(".")
            yield node.lineno, aliases.get(first, first) + dot + rest
        elif isinstance(node, ast.keyword) and node.arg and ast.unparse(node.value) != "False":
            yield node.lineno, node.arg


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    found = read_sources(ROOT)
    assert {"holter/__init__.py", "holter/record.py"} <= found.keys(), "the gates would pass on nothing"
    return found


def test_the_reading_side_does_not_import_torch(sources: Sources) -> None:
    assert torch_faults(sources) == []


@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        ({"holter/run.py": "import torch"}, "holter.run -> torch"),
        (
            {"holter/run.py": "try:\n    from torch.nn import Module\nexcept ImportError: pass"},
            "holter.run -> torch",
        ),
        (
            {"holter/run.py": "from .series import x", "holter/series.py": "import torch"},
            "holter.run -> holter.series",
        ),
        (
            {"holter/cli.py": "from holter import capture", "holter/capture.py": "import torch"},
            "-> holter.capture ->",
        ),
        (
            {
                "holter/statistics/rows.py": "",
                "holter/statistics/__init__.py": "from holter.statistics import measure\n",
            }
            | {"holter/statistics/measure.py": "import torch"},
            "holter.statistics.rows -> holter.statistics -> holter.statistics.measure -> torch",
        ),
    ],
)
def test_torch_planted_on_the_reading_side_is_found(planted: Sources, fault: str) -> None:
    assert any(fault in found for found in torch_faults({"holter/__init__.py": "", **planted}))


def test_torch_on_its_own_side_or_when_asked_for_is_no_fault() -> None:
    deferred = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\ndef f():\n    import torch"
    package = {"holter/capture.py": "import torch\nfrom holter import record", "holter/record.py": deferred}
    assert torch_faults(package) == direction_faults(package) == []


def test_the_reading_side_does_not_import_the_torch_side(sources: Sources) -> None:
    assert direction_faults(sources) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("holter/journal.py", "import holter.monitor"),
        ("holter/journal.py", "def f():\n    from .monitor import Monitor"),
        ("holter/diagnosis/causes/rate.py", "from ...monitor import Monitor"),
        ("holter/cli.py", "from holter.monitor import watch"),
    ],
)
def test_an_import_against_the_direction_is_found(path: str, text: str) -> None:
    package = {"holter/__init__.py": "", "holter/monitor.py": "", path: text}
    assert direction_faults(package) == [f"{module_name(path)} imports holter.monitor"]


def test_a_door_may_import_the_torch_side_when_asked() -> None:
    package = {"holter/cli.py": "def demo():\n    import holter.monitor", "holter/monitor.py": ""}
    assert direction_faults(package) == []


def test_import_holter_is_light() -> None:
    assert loading_faults(["holter"], LIGHT, ROOT) == []


def test_no_module_of_the_reading_side_loads_torch(sources: Sources) -> None:
    """`import holter.run, holter.history, holter.cli` and all the others, as an interpreter sees it."""
    modules = [module_name(path) for path in reading_side(sources)]
    assert loading_faults([name for name in modules if "__main__" not in name], ["torch"], ROOT) == []


def test_a_heavy_import_is_found_even_where_no_parser_sees_it(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text("__import__('cli' + 'ck')")
    assert loading_faults(["planted"], LIGHT, tmp_path) == ["click"]


def test_the_tree_in_the_readme_is_true() -> None:
    assert tree_faults((ROOT / "README.md").read_text("utf-8"), package_files(ROOT)) == []


def test_a_tree_that_is_not_true_is_found(tmp_path: Path) -> None:
    for name in (
        "__init__.py",
        "run.py",
        "new.py",
        "sinks/__init__.py",
        "sinks/console.py",
        "sinks/memory.py",
    ):
        (tmp_path / "holter" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "holter" / name).touch()
    tree = "holter/\n  __init__.py  names\n  run.py\n  gone.py  old\n  sinks/  where\n    console.py  lines\n"
    assert tree_faults(f"# Holter\n```text\n{tree}```\n", package_files(tmp_path)) == [
        "holter/gone.py does not exist",
        "holter/new.py has no line",
        "holter/run.py has no words",
        "holter/sinks/memory.py has no line",
    ]


def test_files_and_functions_are_short(sources: Sources) -> None:
    assert size_faults(sources) == []


def test_a_long_file_and_a_long_function_are_found() -> None:
    body = "    x = 1\n"
    fits = {"holter/a.py": "def f():\n" + body * (FUNCTION_LINES - 1) + "\n" * (FILE_LINES - FUNCTION_LINES)}
    planted = {
        "holter/b.py": "class A:\n  async def f():\n" + body * FUNCTION_LINES,
        "holter/c.py": "\n" * 401,
    }
    assert size_faults(fits) == []
    assert len(size_faults(planted)) == 2


def test_the_reading_side_never_runs_what_it_reads(sources: Sources) -> None:
    """P25: data is never code."""
    assert code_faults(sources) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "x = eval('1')",
        "run = exec",
        "import yaml as y\ny.load(text)",
        "from yaml import unsafe_load",
        "def f():\n    import torch\n    return torch.load(path)",
        "from torch import load",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import pandas as pd\npd.read_pickle(path)",
    ],
)
def test_code_planted_in_a_reader_is_found(text: str) -> None:
    """P25: the planted faults."""
    assert code_faults({"holter/journal.py": text})


def test_what_only_looks_like_code_is_no_fault() -> None:
    """P25: model.eval(), safetensors' load and allow_pickle=False are fine."""
    text = "from safetensors.numpy import load\nload(x); model.eval(); np.load(path, allow_pickle=False)"
    assert code_faults({"holter/journal.py": text, "holter/monitor.py": "import pickle"}) == []
