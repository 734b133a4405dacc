"""Who may ask: the names of this machine, our own page, and nobody's form."""

import pytest

QUESTION = {"question": "bees?"}


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8137", "localhost.evil.example", "[", "", "127.0.0.1.nip.io"]
)
def test_a_name_that_is_not_this_machines_is_refused(client, host):
    for path in ("/", "/static/app.js", "/api/status"):
        answer = client.get(path, headers={"Host": host})
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8137"])
def test_its_own_name_is_served_with_any_port_and_case(client, host):
    assert client.get("/api/status", headers={"Host": host}).status_code == 200


def test_where_every_address_is_served_names_are_still_refused(make_client):
    client = make_client(hosts=None)
    for host in ("192.168.1.7:8137", "[::1]:8137", "localhost"):
        assert client.get("/", headers={"Host": host}).status_code == 200
    assert client.get("/", headers={"Host": "rebound.example"}).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": "http://localhost:9999"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_another_page_cannot_ask(client, headers):
    answer = client.post("/api/ask", json=QUESTION, headers=headers)
    assert answer.status_code == 403
    assert client.page._busy == 0


def test_a_form_cannot_ask(client):
    del client.headers["X-EntroPrefill"]
    answer = client.post("/api/ask", content=b'{"question": "bees?"}', headers={"Content-Type": "text/plain"})
    assert answer.status_code == 403
    assert "X-EntroPrefill".lower() in answer.json()["error"]


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_link_or_an_image_of_another_site_reads_nothing(client, site):
    answer = client.get("/api/status", headers={"Sec-Fetch-Site": site})
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers
    assert client.get("/", headers={"Sec-Fetch-Site": site}).status_code == 200, "a link to the page itself is fine"


def test_only_the_pages_script_begins_a_visit(client):
    client.cookies.clear()
    del client.headers["X-EntroPrefill"]
    before = len(client.page.visits._visits)
    for _ in range(40):
        answer = client.get("/api/status")
        assert answer.status_code == 200
        assert "set-cookie" not in answer.headers
    assert len(client.page.visits._visits) == before


@pytest.mark.parametrize("host", ["evil.example@127.0.0.1", "127.0.0.1/evil", "127.0.0.1:8137:1", "[::1"])
def test_a_host_that_is_no_host_is_refused(make_client, host):
    assert make_client(hosts=None).get("/", headers={"Host": host}).status_code == 403


def test_our_own_page_can(client):
    own = {"Origin": "http://localhost:8137", "Sec-Fetch-Site": "same-origin"}
    assert client.post("/api/ask", json=QUESTION, headers=own).status_code == 200


@pytest.mark.parametrize("path", ["/", "/static/app.css", "/api/status", "/nothing", "/api/record/none"])
def test_every_response_says_what_a_browser_may_do_with_it(client, path):
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"


def test_the_page_loads_nothing_from_elsewhere_and_holds_no_script_of_its_own(client):
    page = client.get("/").text
    assert "http://" not in page
    assert "https://" not in page
    assert "style=" not in page
    assert page.count("<script") == 1
    assert "innerHTML" not in client.get("/static/app.js").text


@pytest.mark.parametrize("name", ["..%2fserver.py", "index.html", "app.py", "%2e%2e/server.py"])
def test_nothing_else_is_given_out(client, name):
    assert client.get(f"/static/{name}").status_code == 404
