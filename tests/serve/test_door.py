"""At the door: which hosts are answered, which formats, which ids have a path, and how many names a request lists."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from serving import MODEL, b64, created, error_of, make_store, query, rank, serving, update

pytest.importorskip("httpx")

from cdr_kernel.serve import Settings
from cdr_kernel.serve._schema import wants_msgpack
from cdr_kernel.serve._settings import host_name

NAMES = [f"n{i}" for i in range(30)]
RERANK = {"model": MODEL, "query_embedding": b64(query()), "documents": [{"id": name} for name in NAMES]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("door") / "store"
    make_store().save(path)
    return path


@pytest.fixture(scope="module")
def client_of_few_names(folder):
    with serving(folder, max_names=20, max_names_bytes=2048, max_facts=3, max_attributes=4) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/rank", rank(where={"source": NAMES}), "where['source']"),
        ("/rank", rank(where={"source": [*NAMES[:15]], "nothing": NAMES[:15]}), "where['nothing']"),
        ("/rank", rank(where=dict.fromkeys(NAMES)), "where"),
        ("/rank", rank(where={"source": "x" * 3000}), "where['source']"),
        ("/rank", rank(multiplier=dict.fromkeys(NAMES, 1.0)), "multiplier"),
        ("/update", update(packed=NAMES), "packed"),
        ("/update", update(packed=["é" * 900, "ü" * 900]), "packed"),
        ("/update", update(NAMES), "report.addressed"),
        ("/v1/facts/delete", {"ids": NAMES}, "ids"),
        ("/v1/facts/quarantine", {"ids": NAMES}, "ids"),
        ("/v1/facts/release", {"ids": NAMES}, "ids"),
        ("/v1/rerank", RERANK, "documents"),
    ],
)
def test_a_request_lists_so_many_names(client_of_few_names, path, body, field):
    client = client_of_few_names
    sid = created(client)
    before = client.get(f"/v1/sessions/{sid}").json()
    answer = client.post(path if path.startswith("/v1") else f"/v1/sessions/{sid}{path}", json=body)
    told = error_of(answer)
    assert (answer.status_code, told["code"], told["field"]) == (413, "too_large", field)
    assert "--max-names" in told["expected"]
    assert client.get(f"/v1/sessions/{sid}").json() == before


def test_names_up_to_the_limit_are_taken(client_of_few_names):
    client = client_of_few_names
    sid = created(client)
    where = {"source": ["doc0", *NAMES[:17], "a" * 1500]}
    answer = client.post(f"/v1/sessions/{sid}/rank", json=rank(where=where))
    assert answer.status_code == 200, answer.text
    assert {fact["source"] for fact in answer.json()["facts"]} == {"doc0"}


def test_a_request_adds_so_many_facts_and_a_store_has_so_many_attributes(client_of_few_names):
    def added(n, *names):
        facts = [
            {"id": f"a{i}", "text": "t", "embedding": b64(query(i)), "attributes": dict.fromkeys(names, 1)}
            for i in range(n)
        ]
        return client_of_few_names.put("/v1/facts", json={"embedding_model": MODEL, "facts": facts})

    assert error_of(added(4))["expected"].startswith("at most 3 facts (--max-facts)")
    assert added(3, "a", "b", "c").status_code == 200
    answer = added(1, "d", "e")
    assert (answer.status_code, error_of(answer)["field"]) == (413, "facts.attributes")
    assert "--max-attributes" in error_of(answer)["expected"]
    assert added(1, "d").status_code == 200
    assert added(1, "a", "d").status_code == 200


def test_a_long_unknown_field_is_not_repeated_whole(client_of_few_names):
    answer = client_of_few_names.post("/v1/facts/delete", json={"ids": ["a"], "x" * 100_000: 1})
    assert answer.status_code == 422
    assert len(answer.content) < 1000
    assert "xxx..." in error_of(answer)["field"]


@pytest.mark.parametrize("id", ["a\n", "\na", "a\nb", "a\r\n", "a/b", "a b\n\n", "\u2028"])
def test_every_id_that_can_be_added_has_a_path(client_of_few_names, id):
    facts = [{"id": id, "text": "t", "embedding": b64(query())}]
    added = client_of_few_names.put("/v1/facts", json={"embedding_model": MODEL, "facts": facts})
    assert added.status_code == 200, added.text
    path = "/v1/facts/" + quote(id, safe="")
    assert client_of_few_names.get(path).json()["id"] == id
    assert client_of_few_names.delete(path).json()["removed"] == 1
    assert client_of_few_names.get(path).status_code == 404


def test_a_path_with_a_newline_behind_it_is_another(client_of_few_names):
    assert client_of_few_names.get("/v1/stats").status_code == 200
    assert client_of_few_names.get("/v1/stats%0A").status_code == 404
    assert client_of_few_names.get("/livez%0A").status_code == 404


@pytest.mark.parametrize(
    ("accept", "msgpack"),
    [
        (None, False),
        ("", False),
        ("*/*", False),
        ("application/*", False),
        ("application/json", False),
        ("application/msgpack", True),
        ("Application/MsgPack", True),
        ("application/msgpack, */*", True),
        ("application/msgpack, application/json;q=0.5", True),
        ("application/json;q=0.4, application/msgpack;q=0.5", True),
        ("application/json, application/msgpack;q=0.5", False),
        ("application/msgpack;q=0.1, */*", False),
        ("application/msgpack;q=0.1, application/*;q=0.05", True),
        ("application/msgpack;q=0", False),
        ("application/msgpack ; q = 0.000 , text/html", False),
        ("application/msgpack;v=1;q=0.2, application/json;q=0.1", True),
        ("application/msgpack;q=nonsense, application/json", False),
        ("application/msgpacked", False),
        ("text/html, application/msgpack-seq, application/json", False),
    ],
)
def test_the_format_with_the_higher_quality_is_answered(accept, msgpack):
    assert wants_msgpack(accept) is msgpack


def test_a_server_on_loopback_without_keys_answers_its_own_names_alone(folder):
    """Else a page in a browser whose name was bound to 127.0.0.1 could read and change everything."""
    settings = Settings(store=folder, allowed_hosts=("Known.example",))
    with serving(folder) as client:
        client.app.state.service.hosts = settings.hosts
        for host in ("localhost", "localhost:8080", "127.0.0.1:1", "[::1]:8080", "LOCALHOST.", "known.example:80"):
            assert client.get("/v1/stats", headers={"Host": host}).status_code == 200, host
        for host in (
            "evil.example",
            "evil.example:8080",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "[::2]",
            "",
        ):
            for path in ("/v1/stats", "/livez", "/metrics", "/openapi.json"):
                answer = client.get(path, headers={"Host": host})
                assert (answer.status_code, error_of(answer)["code"]) == (421, "misdirected"), (host, path)
        assert "--allowed-host" in error_of(answer)["expected"]
        counted = client.get("/metrics", headers={"Host": "localhost"}).text
        assert 'code="misdirected"} 24.0' in counted.replace("reason=", "code=")


@pytest.mark.parametrize(
    ("settings", "hosts"),
    [
        ({}, {"localhost", "127.0.0.1", "[::1]"}),
        ({"host": "127.9.9.9"}, {"localhost", "127.0.0.1", "[::1]", "127.9.9.9"}),
        ({"host": "::1"}, {"localhost", "127.0.0.1", "[::1]"}),
        ({"allowed_hosts": ("A.b",)}, {"localhost", "127.0.0.1", "[::1]", "a.b"}),
        ({"host": "0.0.0.0", "open_to_all": True}, None),
        ({"keys": "k"}, None),
        ({"keys": "k", "allowed_hosts": ("a",)}, {"localhost", "127.0.0.1", "[::1]", "a"}),
    ],
)
def test_which_hosts_are_answered(settings, hosts):
    assert Settings(store="s", **settings).hosts == hosts


@pytest.mark.parametrize("names", ["a", ("a:80",), ("",), ("::1",), (1,)])
def test_a_host_is_named_without_its_port(names):
    with pytest.raises((TypeError, ValueError), match="allowed_hosts"):
        Settings(store="s", allowed_hosts=names)
    assert host_name(" [::1]:80 ") == "[::1]"
