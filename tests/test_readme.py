"""The README stays true: its snippet runs and says what it says, its commands exist, its links lead somewhere."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.model
@pytest.mark.slow
def test_the_snippet_prunes_and_answers(smollm2, monkeypatch):
    from entroprefill_rag import LocalBackend

    backend = LocalBackend(*smollm2)
    monkeypatch.setattr(LocalBackend, "from_pretrained", lambda name: backend)
    found: dict[str, object] = {}
    exec(re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1), found)
    result = found["result"]
    backend.close()
    assert result.pruned
    assert "lease" in result.retained_ids
    assert "six months" in result.answer


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"`[^`]*`", "", page.read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_make_target_it_names_exists():
    named = set(re.findall(r"make ([a-z][a-z-]*)", README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"demo", "test", "bench-prefill"} <= named
    assert named <= targets


def test_make_demo_asks_the_example_documents():
    done = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--docs examples/documents" in done.stdout
    assert len(list((ROOT / "examples" / "documents").iterdir())) >= 5
