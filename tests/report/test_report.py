"""Reports: the numbers of the page are those of the run, hostile texts stay texts, and a browser has nothing to say."""

from __future__ import annotations

import base64
import copy
import functools
import hashlib
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cdr_kernel import demo
from cdr_kernel.cli._app import app
from cdr_kernel.exceptions import FileError
from cdr_kernel.report import named, read_run, report_html, write_report
from cdr_kernel.report._charts import luminance, window_colour
from cdr_kernel.report._runs import METRICS, Run

STYLE = Path(demo.__file__).parent.parent / "report" / "style.css"
HOSTILE = "</script><script>window.hacked=1</script> <img src=x onerror=hacked()> & \" ' \u2028\u202e"
HOSTILE += "\x00\x1b[31m \ud800 日本語"


@functools.cache
def documents_as_json():
    corpus = demo.load()
    runs = demo.run_demo(corpus)
    return json.dumps(demo.documents(corpus, runs, min_relevance=demo.MIN_RELEVANCE))


def documents():
    return json.loads(documents_as_json())


def hostile():
    """A run whose every text is out to break the page."""
    run = documents()["CDR"]
    run["task"]["query"] = run["model"] = HOSTILE
    run["error"], run["complete"] = HOSTILE, False
    for sub in run["task"]["sub_queries"]:
        sub["label"] = HOSTILE
    for window in run["windows"]:
        window["anchor"] = window["output"] = HOSTILE
        window["headers"]["CRP-Context-Continuation-Status"] = HOSTILE
        window["exit"]["detail"] = HOSTILE
        window["envelope"]["texts"] = [HOSTILE + "x" * 100_000] + [HOSTILE] * (len(window["facts"]) - 1)
        for fact in window["facts"]:
            fact["id"], fact["source"] = f"{HOSTILE}{fact['id']}", HOSTILE
    return run


class Page(HTMLParser):
    """Tables and facts of a report, as (shown, value) of every number in them."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.rows, self.facts, self.tags, self.problems, self.data = {}, {}, [], [], ""
        self.table = self.run = self.fact = self.value = None
        self.reading = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if tag == "table":
            self.table = "heat" if attrs.get("class") == "heat" else "numbers"
            self.run = attrs.get("data-run")
        if tag == "tbody" and "data-run" in attrs:
            self.run = attrs["data-run"]
        if tag == "tr" and self.run is not None:
            self.rows.setdefault((self.table, self.run), []).append([])
        if tag == "li" and re.fullmatch(r"r\d+w\d+f\d+", attrs.get("id", "")):
            self.fact = self.facts.setdefault(attrs["id"], [])
        if tag == "data":
            self.value = attrs["value"]
        self.reading = tag == "script" and attrs.get("id") == "cdr-data"

    def handle_endtag(self, tag):
        if tag == "table":
            self.table = self.run = None
        if tag == "li":
            self.fact = None
        if tag == "data":
            self.value = None
        if tag == "script":
            self.reading = False

    def handle_data(self, text):
        if self.reading:
            self.data += text
        if self.value is not None:
            pair = (text, float(self.value))
            if self.fact is not None:
                self.fact.append(pair)
            elif self.run is not None:
                self.rows[self.table, self.run][-1].append(pair)


def check_numbers(text, runs):
    """Every number of windows, sub-topics and facts on the page against the runs; how many were compared."""
    page = Page(text)
    assert [run["name"] for run in json.loads(page.data)["runs"]] == list(runs)
    for found, (name, document) in zip(json.loads(page.data)["runs"], runs.items(), strict=True):
        assert found == {"name": name, **document}
    compared = 0

    def same(pairs, values, digits):
        nonlocal compared
        assert len(pairs) == len(values)
        for (shown, kept), value in zip(pairs, values, strict=True):
            assert kept == value
            assert shown.replace("\u2212", "-") == f"{value:.{digits}f}"
            compared += 1

    for i, document in enumerate(runs.values()):
        rows = [row for row in page.rows["numbers", str(i)] if row]
        for row, window in zip(rows, document["windows"], strict=True):
            facts, report, envelope = window["facts"], window["report"], window["envelope"]
            expected = [
                math.fsum(fact["relevance"] for fact in facts) / len(facts) if facts else None,
                window["novelty_mean"],
                window["fresh"] / len(facts) if facts else None,
                None if report is None else report["completeness_score"],
                window["novelty_min"],
            ]
            given = [value for value in expected if value is not None]
            same(row[: len(given)], given, 2)
            counts = [
                len(facts),
                window["fresh"],
                envelope["qualified"],
                envelope["guard_activations"],
                window["words"],
            ]
            same(row[len(given) :], counts, 0)
        words = {sub["id"]: 0 for sub in document["task"]["sub_queries"]}
        shares = {sub["id"]: [] for sub in document["task"]["sub_queries"]}
        for window in document["windows"]:
            for sub in document["task"]["sub_queries"]:
                if window["report"] is not None:
                    words[sub["id"]] += window["report"]["words_by_sub_query"].get(sub["id"], 0)
                    shares[sub["id"]].append(min(1.0, words[sub["id"]] / sub["expected_words"]))
        heat = [row for row in page.rows["heat", str(i)] if row]
        for row, expected in zip(heat[:-1], shares.values(), strict=True):
            assert [value for _, value in row] == expected
            assert [shown for shown, _ in row] == [str(round(100 * value)) for value in expected]
            compared += len(row)
        same(heat[-1], [w["report"]["completeness_score"] for w in document["windows"] if w["report"]], 2)
        for window in document["windows"]:
            for place, fact in enumerate(window["facts"]):
                names = ["score", "relevance", "residual_pull", "spec_novelty"]
                pairs = page.facts[f"r{i}w{window['number']}f{place + 1}"]
                same(pairs[:4], [fact[name] for name in names], 3)
                more = [(fact["ngram_overlap"], 0)] if fact["ngram_overlap"] else []
                more += [(fact["importance"], 3)] if fact["importance"] != 1.0 else []
                for pair, (value, digits) in zip(pairs[4:], more, strict=True):
                    same([pair], [value], digits)
    return compared


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_numbers_of_the_page_are_those_of_the_runs(count):
    runs = dict(list(documents().items())[:count])
    text = report_html(runs)
    text.encode("ascii")
    assert check_numbers(text, runs) > 200 * count


def test_a_page_loads_nothing():
    for tag, attrs in Page(report_html(documents())).tags:
        assert tag not in ("iframe", "object", "embed", "form", "base")
        for name in ("src", "href", "action", "poster", "srcset"):
            assert attrs.get(name, "#").startswith(("#", "data:,")), (tag, attrs)
    assert "@import" not in STYLE.read_text()
    assert "url(" not in STYLE.read_text()


def test_ids_are_unique_and_links_lead_somewhere():
    tags = Page(report_html(documents())).tags
    ids = [attrs["id"] for _, attrs in tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {attrs["href"][1:] for _, attrs in tags if attrs.get("href", "").startswith("#")} <= set(ids)


def outcomes(runs):
    """The outcome table of a page as text, by row, and the text of the page's header."""
    text = report_html(runs)
    table = re.search(r'<table class="outcome">.*?</table>', text)[0]
    rows = [re.sub(r"<svg.*?</svg>|<[^>]+>", " ", row) for row in table.split("<tr>")[1:]]
    header = re.sub(r"<svg.*?</svg>|<[^>]+>", " ", re.search(r"<header>.*?</header>", text, re.S)[0])
    return [" ".join(row.split()) for row in rows], " ".join(header.split())


def test_each_run_has_totals_of_its_own():
    whole, part = documents()["CDR"], documents()["CDR"]
    part["task"]["sub_queries"] = part["task"]["sub_queries"][:3]
    part["windows"], part["store"]["facts"] = part["windows"][:1], 5
    places = [sum(len(w["facts"]) for w in run["windows"] if w["written"]) for run in (whole, part)]
    (head, first, second), header = outcomes({"A": whole, "B": part})
    assert places[0] != places[1]
    assert "places" not in head
    assert "of the task, as assessed" in head
    assert f"in {places[0]} places" in first
    assert f"in {places[1]} places" in second
    assert "of 8 , with a labelled" in first
    assert "of 3 , with a labelled" in second
    assert re.search(r"A 478 facts .* 8 sub-topics B 5 facts .* 3 sub-topics", header)
    assert "different tasks and stores: their numbers do not compare" in header


def test_runs_of_one_task_and_store_share_a_header():
    _, header = outcomes(dict(list(documents().items())[:2]))
    assert header.count("478 facts") == header.count("8 sub-topics") == 1
    assert "compare" not in header
    runs = documents()
    runs["CDR"]["model"] = "another"
    assert "different embedding models: their" in outcomes(runs)[1]


def test_hostile_texts_stay_texts():
    plain, mean = report_html({"a": documents()["CDR"]}), report_html({HOSTILE: hostile()})

    def tags(text):
        return [tag for tag, _ in Page(text).tags if tag not in ("details", "summary", "p", "span", "bdi", "strong")]

    assert tags(mean) == tags(plain)  # whatever the texts are, no element more
    assert "onerror" not in str([attrs for _, attrs in Page(mean).tags if "onerror" in attrs])
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", mean)
    assert json.loads(Page(mean).data)["runs"][0]["windows"][0]["output"] == HOSTILE


def test_one_window_none_and_a_run_from_before_maps():
    run = documents()["CDR"]
    for fact in (fact for window in run["windows"] for fact in window["facts"]):
        del fact["place"], fact["multiplier"]
    del run["map"]
    assert "Map of the store" not in report_html({"old": run})
    assert "before runs had them" in report_html({"old": run, "new": documents()["CDR"]})
    run["windows"] = run["windows"][:1]
    report_html({"one": run})
    run["windows"] = []
    assert "No window was finished." in report_html({"none": run})
    empty = documents()["CDR"]
    last = empty["windows"][-1]
    last.update(written=False, facts=[], fresh=0, novelty_mean=None, novelty_min=None, report=None, output=None)
    last["envelope"].update(ids=[], texts=[])
    assert "No fact was packed." in report_html({"end": empty})


def test_what_a_run_has_beyond_the_usual_is_shown():
    run = documents()["CDR"]
    fact = run["windows"][1]["facts"][0]
    fact.update(novelty=1.7, score=1.9, score_without_guard=1.9, residual_pull=-0.4, importance=0.0, relevance=-0.2)
    run["task"]["sub_queries"][0].update(expected_words=0, marginal=True)
    run["task"]["sub_queries"][1].update(expected_words=None)
    run["windows"] = [dict(copy.deepcopy(run["windows"][i % 5]), number=i + 1) for i in range(20)]
    text = report_html({"long": run})
    assert "marginal" in text
    assert "&#8722;0.400" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: run.update(schema=2), "schema: expected 1, got 2"),
        (lambda run: run.pop("windows"), "windows: expected a list"),
        (lambda run: run["windows"][1].pop("facts"), r"windows\[1\].facts: expected a list"),
        (lambda run: run["windows"][0]["facts"][2].update(score="high"), r"facts\[2\].score: expected a number"),
        (lambda run: run["windows"][0]["envelope"]["texts"].pop(), "texts: expected 10"),
        (lambda run: run["windows"][0].update(report={}), "report.completeness_score: expected a number"),
        (lambda run: run["task"]["sub_queries"].append(3), r"sub_queries\[8\]: expected an object"),
        (lambda run: run["windows"][0].update(fresh=True), "fresh: expected an integer"),
        (lambda run: run["windows"][1].update(words="x"), r"windows\[1\].words: expected an integer"),
        (lambda run: run["windows"][1].update(number=10**400), r"windows\[1\].number: expected a number up to 2\^53"),
        (lambda run: run["windows"][1].update(number=-5), r"windows\[1\].number: expected 2, got -5"),
        (lambda run: run["windows"][0]["envelope"]["texts"].__setitem__(3, 5), r"texts\[3\]: expected a string, got 5"),
        (
            lambda run: run["windows"][0]["facts"][2].update(importance=None),
            r"facts\[2\].importance: expected a number",
        ),
        (lambda run: run["windows"][0]["facts"][2].update(place=[1.0]), r"facts\[2\].place: expected \[x, y\]"),
        (lambda run: run["map"].update(query=5), "map.query: expected a list, got 5"),
        (lambda run: run["map"]["points"].append([0.0, "x"]), r"map.points\[\d+\].y: expected a number"),
    ],
)
def test_what_is_no_run_is_refused_by_name(change, message):
    run = documents()["CDR"]
    change(run)
    with pytest.raises(FileError, match=message):
        report_html({"it": run})


def test_the_number_of_runs_and_the_files(tmp_path):
    run = documents()["CDR"]
    with pytest.raises(FileError, match="1 to 4 runs, got 5"):
        report_html({str(i): run for i in range(5)})
    with pytest.raises(FileError, match="got 0"):
        report_html({})
    path = tmp_path / "run.json"
    path.write_text("{")
    with pytest.raises(FileError, match="expected JSON"):
        read_run(path)
    path.write_text("[]")
    with pytest.raises(FileError, match="expected an object"):
        read_run(path)
    path.write_text(json.dumps(run))
    assert list(named([path, path])) == ["run", "run (2)"]
    with pytest.raises(FileNotFoundError):
        read_run(tmp_path / "none.json")


def test_the_commands_write_it(tmp_path):
    run, page = tmp_path / "run.json", tmp_path / "r.html"
    run.write_text(json.dumps(documents()["CDR"]))
    done = CliRunner().invoke(
        app, ["report", str(run), str(run), "--name", "A", "--name", "B", "-o", str(page), "--json"]
    )
    assert json.loads(done.stdout) == {"output": str(page), "windows": {"A": 5, "B": 5}}
    assert check_numbers(page.read_text(), {"A": documents()["CDR"], "B": documents()["CDR"]})
    for line, message in (
        (["report", str(run), "-o", str(run)], "expected a file of its own"),
        (["report", str(run), "--name", "A", "--name", "B", "-o", str(page)], "expected 1"),
        (["report", *[str(run)] * 5, "-o", str(page)], "4 runs at most"),
        (
            ["report", str(run), "-o", str(tmp_path / "r.docx")],
            "ends in .html, .htm or no ending for a page, .png, .svg",
        ),
        (["demo", "--report", str(tmp_path / "r.json")], "got '.json'"),
        (["run", str(run), str(run), "--writer", "extract", "--report", str(tmp_path / "r.txt")], "got '.txt'"),
        (["report", str(tmp_path / "no.json"), "-o", str(page)], "No such file"),
    ):
        done = CliRunner().invoke(app, line)
        assert done.exit_code != 0
        assert message in " ".join(done.output.split()), done.output
    done = CliRunner().invoke(app, ["demo", "--windows", "2", "--report", str(page), "--json"])
    assert done.exit_code == 0
    runs = json.loads(Page(page.read_text()).data)["runs"]
    assert [one["name"] for one in runs] == ["Relevance alone", "CDR", "Calibrated"]
    assert [len(one["windows"]) for one in runs] == [2, 2, 2]


def test_cdr_run_writes_a_report_with_a_map(tmp_path):
    package = Path(demo.__file__).parent
    files = {name: str(package / name) for name in ("facts.jsonl", "task.json", "queries_minilm_f16.npz")}
    store, page, run = tmp_path / "store", tmp_path / "r.html", tmp_path / "run.json"
    index = ["index", files["facts.jsonl"], "--embeddings", str(package / "facts_minilm_f16.npy"), "--model", "m"]
    assert CliRunner().invoke(app, [*index, "-o", str(store)]).exit_code == 0
    line = ["run", str(store), files["task.json"], "--vectors", files["queries_minilm_f16.npz"], "--writer", "extract"]
    more = ["--min-relevance", "0.3", "--report", str(page), "-o", str(run), "--windows", "3", "--json"]
    assert CliRunner().invoke(app, [*line, *more]).exit_code == 0
    document = json.loads(run.read_text())
    assert check_numbers(page.read_text(), {document["task"]["id"]: document})
    assert len(document["map"]["points"]) == 478
    assert len(document["map"]["sub_queries"]) == 8
    assert all(len(fact["place"]) == 2 for window in document["windows"] for fact in window["facts"])


def test_metrics_of_a_window_without_facts_or_report():
    empty = {"facts": [], "fresh": 0, "novelty_mean": None, "report": None}
    assert [metric.of(empty) for metric in METRICS] == [None] * 4
    assert Run("x", {"windows": []}).completeness is None


def contrast(one, other):
    light, dark = sorted((luminance(*_rgb(one)), luminance(*_rgb(other))), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _rgb(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    return [int(digits[i : i + 2], 16) for i in (0, 2, 4)]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_stands_out_in_both_themes(theme):
    css = STYLE.read_text()
    pair = r"light-dark\((#\w+), (#\w+)\)"
    colours = {name: (light, dark)[theme] for name, light, dark in re.findall(rf"--(\w+): {pair}", css)}
    for ground in ("bg", "panel", "sunken"):
        for text in ("ink", "soft", "warn", "run0", "run1", "run2", "run3"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    heats = re.findall(rf"\.h\d+ {{ background: {pair}; color: {pair}; }}", css)
    assert len(heats) == 11
    for heat in heats:
        assert contrast(heat[theme], heat[2 + theme]) >= 4.5
    for count in range(1, 21):
        for number in range(1, count + 1):
            assert contrast(*window_colour(number, count)) >= 4.5


def test_figures(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra report")
    for suffix, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        path = tmp_path / f"figure{suffix}"
        write_report(path, documents())
        assert path.read_bytes().startswith(magic)
    again = tmp_path / "again.svg"
    write_report(again, documents())
    assert again.read_bytes() == (tmp_path / "figure.svg").read_bytes()
    drawn = again.read_text()
    for text in ("Relevance alone", "Calibrated", "Flat network model", "Completeness"):
        assert text in drawn
    mean = hostile()
    mean["windows"] = mean["windows"][:2]
    write_report(tmp_path / "mean.svg", {"$\\frac{": mean})
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "again.svg",
        "figure.pdf",
        "figure.png",
        "figure.svg",
        "mean.svg",
    ]


def digest(script):
    """What a Content Security Policy calls a script."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def test_the_one_script_of_a_report_is_allowed_by_its_digest():
    text = report_html(documents())
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.S)
    assert rules["script-src"] == f"'sha256-{digest(script)}'"
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert not re.search(r"<[^>]*\son[a-z]+\s*=", text), "no handler of an event stands in an attribute"


def test_figures_without_matplotlib_say_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "\.\[report\]" in a checkout'):
        write_report(tmp_path / "figure.png", documents())


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def browse(page, tmp_path, *flags):
    """Headless Chromium over a page: (what it printed, its console)."""
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
    command += [
        "--enable-logging=stderr",
        "--virtual-time-budget=4000",
        f"--user-data-dir={tmp_path / 'profile'}",
        *flags,
    ]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
class TestInABrowser:
    def test_the_console_is_heard(self, tmp_path):
        page = tmp_path / "loud.html"
        page.write_text("<script>console.error('heard')</script>")
        assert "heard" in browse(page, tmp_path, "--dump-dom")[1][0]

    @pytest.mark.parametrize("what", ["one", "three", "hostile"])
    def test_numbers_and_silence(self, tmp_path, what):
        runs = {"one": {"CDR": documents()["CDR"]}, "three": documents(), "hostile": {HOSTILE: hostile()}}[what]
        page = tmp_path / "report.html"
        write_report(page, runs)
        dom, console = browse(page, tmp_path, "--dump-dom")
        assert console == []
        if what != "hostile":
            assert check_numbers(dom, runs) > 200

    def test_a_script_that_gets_into_the_page_does_not_run(self, tmp_path):
        page = tmp_path / "report.html"
        write_report(page, documents())
        hostile = (
            "<script>document.body.dataset.hacked = 1</script><img src=x onerror='document.body.dataset.hacked = 2'>"
        )
        page.write_text(page.read_text().replace("</body>", f"{hostile}</body>"))
        dom, console = browse(page, tmp_path, "--dump-dom")
        assert "data-hacked" not in dom
        assert sum("Content Security Policy" in line for line in console) >= 2

    def act(self, tmp_path, script, width=400, theme="light", runs=None):
        """Run a script in a report that is so wide; what it returns."""
        page, frame = tmp_path / "report.html", tmp_path / "frame.html"
        write_report(page, runs or documents())
        said = f"parent.postMessage(JSON.stringify((() => {{ {script} }})()), '*')"
        text = page.read_text().replace("script-src ", f"script-src 'sha256-{digest(said)}' ")
        page.write_text(text.replace("</body>", f"<script>{said}</script></body>"))
        frame.write_text(
            "<!doctype html><body><script>"
            "addEventListener('message', e => {document.body.dataset.said = e.data})</script>"
            f'<iframe src="report.html?theme={theme}" style="border:0;width:{width}px;height:900px"></iframe>'
        )
        dom, console = browse(frame, tmp_path, "--dump-dom")
        assert console == []
        return json.loads(Page(dom).tags[[tag for tag, _ in Page(dom).tags].index("body")][1]["data-said"])

    @pytest.mark.parametrize("width", [400, 1280])
    def test_nothing_runs_out_of_the_page(self, tmp_path, width):
        runs = {"long": hostile(), **documents()}
        script = "for (const d of document.querySelectorAll('details')) d.open = true;"
        script += "return [document.documentElement.scrollWidth, innerWidth, window.hacked ?? null];"
        wide, inner, hacked = self.act(tmp_path, script, width, runs=runs)
        assert wide <= inner == width
        assert hacked is None

    def test_a_disc_is_read_by_keyboard_and_leads_to_its_fact(self, tmp_path):
        script = """
            const disc = document.querySelector('.disc'), tip = document.getElementById('tip');
            const before = tip.hidden;
            disc.focus();
            const shown = [tip.hidden, tip.textContent.includes(disc.dataset.text)];
            document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', bubbles: true}));
            const gone = tip.hidden;
            disc.dispatchEvent(new MouseEvent('click', {bubbles: true, cancelable: true}));
            const target = document.getElementById(disc.getAttribute('href').slice(1));
            return [before, ...shown, gone, target.closest('details').open, document.activeElement === target];"""
        assert self.act(tmp_path, script) == [True, False, True, True, True, True]

    def test_a_window_can_be_picked_on_the_map(self, tmp_path):
        script = """
            const map = document.querySelector('.map');
            const input = document.querySelector('fieldset.choose input[value="2"]');
            input.click();
            const on = [...map.querySelectorAll('.disc.on')].map(d => d.dataset.windows);
            return [map.classList.contains('some'), on.length > 0, on.every(w => w.split(' ').includes('2'))];"""
        assert self.act(tmp_path, script, runs={"CDR": documents()["CDR"]}) == [True, True, True]

    def test_the_theme_follows_the_button(self, tmp_path):
        script = """
            const colours = [], button = document.getElementById('theme');
            for (let i = 0; i < 3; i++) {
                const theme = document.documentElement.dataset.theme ?? null;
                colours.push([theme, getComputedStyle(document.body).backgroundColor]);
                button.click();
            }
            return colours;"""
        (one, light), (two, dark), (three, _) = self.act(tmp_path, script)
        assert (one, two, three) == ("light", "dark", None)
        assert light != dark

    @pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")])
    def test_screenshots(self, tmp_path, width, theme):
        """Taken to be looked at; here only that there is something on them."""
        page, frame, shot = tmp_path / "report.html", tmp_path / "frame.html", tmp_path / "shot.png"
        write_report(page, documents())
        frame.write_text(
            f'<!doctype html><body style="margin:0"><iframe src="report.html?theme={theme}" '
            f'style="border:0;width:{width}px;height:3000px"></iframe>'
        )
        browse(frame, tmp_path, f"--screenshot={shot}", f"--window-size={max(500, width)},3000")
        assert shot.stat().st_size > 50_000
