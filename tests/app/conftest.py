"""The page over a tiny model that prunes and a handful of documents, with and without a browser."""

import sys
import threading
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "chat"), str(TESTS / "engine")]


@pytest.fixture(scope="session")
def backend():
    import tiny

    from entroprefill_rag import LocalBackend

    with LocalBackend(tiny.model(), tiny.tokenizer(), name="tiny") as made:
        yield made


@pytest.fixture
def docs(tmp_path):
    from letters import write_documents

    return write_documents(tmp_path / "docs")


class Shared:
    """A backend that a page may close without ending it for the tests after it."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def close(self):
        pass


@pytest.fixture
def make_page(backend, docs):
    """A page; what a test gives replaces what it would have been made with."""
    import tiny
    from letters import LetterEmbedder

    pytest.importorskip("starlette")
    from entroprefill_rag.app.loading import Loaded, Loading
    from entroprefill_rag.app.server import Page
    from entroprefill_rag.cli.console import explained
    from entroprefill_rag.retrieval import FolderIndex

    def make(*, folder=docs, load=None, **changed):
        embedder = LetterEmbedder()

        def loads(tell):
            tell("reading", 0, 0)
            base = None if folder is None else FolderIndex.open(folder, embedder, cache=False, progress=tell)
            return Loaded(Shared(backend), embedder, base)

        def explain(error):
            return explained(error)[0]

        given = {"config": tiny.LOOSE, "top_k": 5, "max_new_tokens": 12, **changed}
        return Page(Loading(load or loads, explain), explain, **given)

    return make


@pytest.fixture
def make_client(make_page):
    """A client of a page that is ready; its requests look like those of the page's script."""
    from starlette.testclient import TestClient

    entered = []

    def make(*, hosts=("localhost",), ready=True, **changed):
        page = make_page(**changed)
        client = TestClient(page.application(hosts), base_url="http://localhost:8137", headers={"X-EntroPrefill": "1"})
        client.page = page
        entered.append(client)
        client.__enter__()
        while ready and page.loading.status()[0] == "loading":
            time.sleep(0.01)
        return client

    yield make
    for client in entered:
        client.__exit__(None, None, None)


@pytest.fixture
def client(make_client):
    return make_client()


@pytest.fixture
def served(make_page):
    """The address of a page that a real server serves, in a thread."""
    uvicorn = pytest.importorskip("uvicorn")
    running = []

    def serve(**changed):
        page = make_page(**changed)
        config = uvicorn.Config(page.application({"127.0.0.1"}), port=0, log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running.append((server, thread))
        while not server.started or page.loading.status()[0] == "loading":
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}", page

    yield serve
    for server, thread in running:
        server.should_exit = True
        thread.join(10)
