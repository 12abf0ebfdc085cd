"""The one-way flow: rooms import only rooms above them, tools_env no JAX."""

import ast
import subprocess
import sys

import pytest

# Reading order = import order = data flow.
ROOMS = (
    "bounds",
    "clashes",
    "config",
    "watch",
    "lock",
    "types",
    "devices",
    "models",
    "rollout",
    "objective",
    "metrics",
    "training",
    "position",
    "rows",
    "data",
    "checkpoints",
    "policy",
    "health",
    "interaction",
    "scoring",
    "alarms",
    "tool_alarms",
    "monitor",
    "report",
    "evaluate",
    "incentives",
    "environments",
    "setup",
    "draws",
    "cold_start",
    "probe",
    "suites",
    "held_out",
    "exports",
    "planning",
    "plan",
    "trainer",
)


def modules(package):
    """Every source file of a package with its dotted name."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path


def imported(path):
    """Dotted names that a file imports anywhere; `from a import b` gives a and a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(name):
    """The room of a dotted name inside grpo_jax, or None."""
    parts = name.split(".")
    return parts[1] if parts[0] == "grpo_jax" and len(parts) > 1 else None


def test_every_module_belongs_to_a_room(repository):
    for name, path in modules(repository / "grpo_jax"):
        if name != "grpo_jax":
            assert room(name) in ROOMS, f"{path} is in no room: add it to the order"


def test_rooms_import_only_rooms_above_them(repository):
    wrong = [
        f"{name} imports {other}"
        for name, path in modules(repository / "grpo_jax")
        if room(name)
        for other in imported(path)
        if room(other) and ROOMS.index(room(other)) > ROOMS.index(room(name))
    ]
    assert not wrong, "\n".join(wrong)


def test_tools_env_imports_nothing_of_the_trainer(repository):
    wrong = [
        f"{name} imports {other}"
        for name, path in modules(repository / "tools_env")
        for other in imported(path)
        if other.split(".")[0] in ("grpo_jax", "configs", "jax", "flax", "torch")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_product_never_imports_torch(repository):
    for package in ("grpo_jax", "tools_env", "configs"):
        for name, path in modules(repository / package):
            assert "torch" not in {m.split(".")[0] for m in imported(path)}, name


def loaded(statement, repository):
    """Names in sys.modules after a statement in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=repository,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(run.stdout.split())


@pytest.mark.parametrize("statement", ["import tools_env", "import run"])
def test_no_jax_at_import(statement, repository):
    assert not loaded(statement, repository) & {"jax", "flax", "torch", "orbax"}


def test_every_tools_env_module_loads_without_jax(repository):
    names = [name for name, _ in modules(repository / "tools_env")]
    names = [name for name in names if not name.endswith("__main__")]
    seen = loaded("import " + ", ".join(names), repository)
    assert not seen & {"jax", "flax", "torch"}


def test_files_stay_small(repository):
    long = []
    for package in ("grpo_jax", "tools_env", "configs"):
        for _, path in modules(repository / package):
            lines = len(path.read_text().splitlines())
            if lines > 400:
                long.append(f"{path}: {lines} lines")
    assert not long, "\n".join(long)
