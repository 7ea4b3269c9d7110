"""What a server is told: addresses, keys, limits, and the errors of what does not go together."""

from __future__ import annotations

import hashlib
import json

import pytest
from commands import invoke

from cdr_kernel.serve import Settings
from cdr_kernel.serve._settings import check_session_settings, for_new_session, is_loopback
from cdr_kernel.session._settings import MODES

pytest.importorskip("msgspec")

from cdr_kernel.serve._errors import of_library
from cdr_kernel.serve._keys import Keys, bearer, same


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_keys(host):
    assert is_loopback(host)
    assert Settings(store="s", host=host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_elsewhere_needs_keys_or_a_word(host, tmp_path):
    with pytest.raises(ValueError, match="expected --keys"):
        Settings(store="s", host=host)
    assert Settings(store="s", host=host, open_to_all=True)
    assert Settings(store="s", host=host, keys=tmp_path / "k")


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ({"port": 70000}, ValueError),
        ({"port": -1}, ValueError),
        ({"max_queue": 0}, ValueError),
        ({"max_queue": True}, TypeError),
        ({"max_batch": 1.5}, TypeError),
        ({"deadline_s": 0}, ValueError),
        ({"deadline_s": float("nan")}, ValueError),
        ({"drain_s": float("inf")}, ValueError),
        ({"token_key": b"short"}, ValueError),
        ({"device_dtype": "float16"}, ValueError),
        ({"device": "nonsense"}, ValueError),
        ({"device": "meta"}, ValueError),
    ],
)
def test_bad_settings(setting, error):
    with pytest.raises(error, match=next(iter(setting))):
        Settings(store="s", **setting)


@pytest.mark.parametrize("given", ["inf", "1e308"])
def test_a_body_without_bounds_is_wrong_usage(given, tmp_path):
    result = invoke("serve", tmp_path, "--max-body-mb", given, code=2)
    told = " ".join(result.output.split())
    assert f"Invalid value for --max-body-mb: expected a finite number, got {float(given)}" in told


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--device", "nonsense"), "for --device: expected one such as 'cuda', 'cuda:1' or 'cpu', got 'nonsense'"),
        (("--device", "cpu", "--device-dtype", "int4"), "for --device-dtype: expected one of float16, bfloat16"),
    ],
)
def test_a_device_that_is_not_there_is_wrong_usage_before_anything_listens(given, told, tmp_path, monkeypatch):
    monkeypatch.setattr("cdr_kernel.serve.serve", lambda settings: pytest.fail("it listens"))
    assert told in " ".join(invoke("serve", tmp_path, *given, code=2).output.replace("│", "").split())


def captured(monkeypatch, *options):
    """The settings that `cdr serve STORE` with these options serves."""
    pytest.importorskip("uvicorn")
    monkeypatch.setattr("cdr_kernel.serve._process.threads_run", lambda: False)  # those of other tests in this process
    made = []
    monkeypatch.setattr("cdr_kernel.serve.serve", lambda settings: made.append(settings) or 0)
    invoke("serve", "STORE", *options)
    return made[0]


def test_the_command_line_sets_the_defaults_of_new_sessions(monkeypatch):
    assert captured(monkeypatch).new_sessions == {"mode": "spec"}
    spec = ["--min-relevance", "0.3", "--windows", "9", "--completion-threshold", "0.8", "--safety-budget", "0.5"]
    spec += ["--exhaustion", "novelty", "--exclude-packed", "--first-window-pull", "--clamp-novelty", "--no-guard"]
    assert captured(monkeypatch, *spec).new_sessions == {
        "mode": "spec",
        "min_relevance": 0.3,
        "max_windows": 9,
        "completion_threshold": 0.8,
        "safety_budget": 0.5,
        "exhaustion": "novelty",
        "exclude_packed": True,
        "first_window_pull": True,
        "clamp_novelty": True,
        "guard": False,
    }
    calibrated = ["--mode", "calibrated", "--gate", "1.5", "--gate-on", "query", "--source", "0.4", "--guard"]
    assert captured(monkeypatch, *calibrated).new_sessions == {
        "mode": "calibrated",
        "gate": 1.5,
        "gate_on": "query",
        "source_weight": 0.4,
        "guard": True,
    }


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--gate", "2"), 'for --gate: gate belongs to mode "calibrated", the mode is "spec"'),
        (
            ("--mode", "calibrated", "--min-relevance", "0.3"),
            'for --min-relevance: min_relevance belongs to mode "spec", the mode is "calibrated": use gate',
        ),
        (("--mode", "calibrated", "--gate", "inf"), "for --gate: gate must be a finite number, got inf"),
    ],
)
def test_a_default_of_the_other_mode_is_wrong_usage_before_anything_listens(options, told, monkeypatch):
    monkeypatch.setattr("cdr_kernel.serve.serve", lambda settings: pytest.fail("it listens"))
    assert told in " ".join(invoke("serve", "STORE", *options, code=2).output.replace("│", "").split())


@pytest.mark.parametrize(
    ("defaults", "says"),
    [
        ({"gate": 2.0}, "gate belongs to mode"),
        ({"min_relevance": 3.0}, r"min_relevance must be in \[-1, 1\]"),
        ({"min_relevanc": 0.3}, "new_sessions: expected settings of Session, got 'min_relevanc'"),
        ({"embedding_model": "m"}, "new_sessions: expected settings of Session, got 'embedding_model'"),
        ({"guard": 1}, "guard must be True or False"),
    ],
)
def test_defaults_of_sessions_are_checked(defaults, says):
    with pytest.raises((TypeError, ValueError), match=says):
        Settings(store="s", new_sessions=defaults)


def test_each_setting_of_one_mode_is_refused_in_the_other():
    """So that a session of another mode than the defaults' takes none that it would refuse."""
    values = {"exhaustion": "novelty", "gate_on": "query", "min_relevance": 0.3, "min_qualified": 3, "gate": 1.0}
    flags = {"first_window_pull", "clamp_novelty", "exclude_packed", "centred_coverage"}
    for mode, other in (("spec", "calibrated"), ("calibrated", "spec")):
        for name in MODES[mode]().own():
            value = True if name in flags else values.get(name, 0.5)
            assert name not in for_new_session({"mode": mode, name: value}, {"mode": other})
            with pytest.raises(ValueError, match=f"{name} belongs to mode"):
                check_session_settings({"mode": other, name: value})
            check_session_settings({"mode": mode, name: value})


def test_a_time_without_end_is_told_as_one():
    with pytest.raises(ValueError, match=r"^stop_s: expected a finite number, at least 0, got inf$"):
        Settings(store="s", stop_s=float("inf"))


def test_secrets_do_not_show():
    shown = repr(Settings(store="s", token_key=b"t" * 32, metrics_key="mmm", redis="redis://:pw@h", hash_key=b"hhh"))
    for secret in ("ttt", "mmm", "pw", "hhh"):
        assert secret not in shown


def digest(key):
    return hashlib.sha256(key.encode()).hexdigest()


def test_keys_belong_to_tenants(tmp_path):
    entries = [("acme", digest("a1")), ("acme", digest("a2")), ("zenith", digest("z"))]
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"tenant": t, "sha256": d} for t, d in entries]}))
    keys = Keys.read(path)
    assert keys.tenants == ["acme", "zenith"]
    assert [keys.tenant(k) for k in ("a1", "a2", "z", "b", "", "\ud800")] == [
        "acme",
        "acme",
        "zenith",
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(
    "entries",
    [[], [("../up", digest("a"))], [("A", digest("a"))], [("a", "12")], [("a", digest("a")), ("b", digest("a"))]],
)
def test_bad_keys(entries, tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"tenant": t, "sha256": d} for t, d in entries]}))
    with pytest.raises(ValueError, match=r"keys.json: "):
        Keys.read(path)


@pytest.mark.parametrize("text", ["", "[]", '{"keys": 3}', '{"keys": [{"tenant": "a", "key": "plain"}]}'])
def test_a_file_of_keys_that_is_none(text, tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="expected") as caught:
        Keys.read(path)
    assert "plain" not in str(caught.value)


def test_bearer_headers():
    assert bearer("Bearer abc") == bearer("bearer  abc ") == "abc"
    assert [bearer(h) for h in (None, "", "Bearer", "Bearer ", "Basic abc", "abc")] == [None] * 6
    assert same("a", "a")
    assert not any([same("a", "b"), same(None, "a"), same("a", None), same(None, None)])


@pytest.mark.parametrize(
    ("error", "status", "field", "expected", "got"),
    [
        (ValueError("k: expected at least 0, got -1"), 422, "k", "at least 0", "-1"),
        (ValueError("max_windows must be 1 to 20, got 21"), 422, "max_windows", "be 1 to 20", "21"),
        (TypeError("completeness_score must be a number, got 'x'"), 422, "completeness_score", "be a number", "'x'"),
        (ValueError("something else"), 422, None, None, None),
        (KeyError("ids: 'a' not in the store"), 404, "ids", "ids of facts that are in the store", "'a'"),
        (KeyError("something else"), 404, None, None, None),
    ],
)
def test_errors_of_the_library_become_refusals(error, status, field, expected, got):
    refusal = of_library(error)
    detail = refusal.detail
    assert (refusal.status, detail.field, detail.expected, detail.got) == (status, field, expected, got)
    assert of_library(RuntimeError("x")) is None
