"""The rules of the house: which way data flows, and what importing the package costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "entroprefill_rag"


def imports(path):
    """Modules of ours that ``path`` imports, type-checking imports left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules(folder):
    return sorted(folder.rglob("*.py"))


@pytest.mark.parametrize("path", modules(PACKAGE / "rule"), ids=lambda path: path.name)
def test_the_rule_knows_no_model(path):
    bad = {name for name in imports(path) if name.split(".")[0] == "transformers" or ".engine" in name}
    assert not bad


@pytest.mark.parametrize("path", modules(PACKAGE / "engine"), ids=lambda path: path.name)
def test_the_engine_knows_no_framework(path):
    bad = {
        name
        for name in imports(path)
        if "integrations" in name or name.split(".")[0] in ("llama_index", "langchain_core")
    }
    assert not bad


@pytest.mark.parametrize("name", ["record.py", "config.py", "request.py", "prompt.py", "errors.py"])
def test_the_types_import_nothing_of_ours_but_each_other(name):
    ours = {module for module in imports(PACKAGE / name) if module.startswith("entroprefill_rag")}
    allowed = {"record", "config", "request", "prompt", "errors"}
    assert {module.split(".")[1] for module in ours if "." in module} <= allowed


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_importing_the_package_loads_neither_torch_nor_a_framework():
    heavy = run(
        "import sys, entroprefill_rag; "
        "print(*[m for m in ('torch', 'transformers', 'llama_index', 'langchain_core', 'scipy', 'numpy', 'pydantic') "
        "if m in sys.modules])"
    )
    assert heavy == []


def test_requests_and_configuration_need_no_torch():
    heavy = run(
        "import sys; from entroprefill_rag import Chunk, RagRequest, PruningConfig, AuditConfig, AuditRecord; "
        "print(*[m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    assert heavy == []


def test_every_public_name_can_be_had():
    import entroprefill_rag

    for name in entroprefill_rag.__all__:
        assert getattr(entroprefill_rag, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = entroprefill_rag.nothing


def test_generated_pages_are_what_the_code_makes():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import generate
    finally:
        sys.path.pop(0)
    for path, text in generate.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"run `python docs/generate.py` to write {path.name} anew"
