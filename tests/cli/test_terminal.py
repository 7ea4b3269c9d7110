"""What the commands print: one line, no control characters, tables that fit."""

from __future__ import annotations

import logging

import pytest

from cdr_kernel.cli._terminal import cell, fits, log_on_stderr, new_table, printable, say, show

STEERING = "\x1b]0;title\x07 \x1b[31mred\x9b0m \r\x08\u202e a\nb\x1cc"
CLEAN = "\ufffd]0;title\ufffd \ufffd[31mred\ufffd0m \ufffd\ufffd a b c"


def test_nothing_steers_the_terminal(capsys):
    assert printable(STEERING) == cell(STEERING).plain == CLEAN
    say(STEERING)
    show(STEERING)
    assert capsys.readouterr() == (f"{CLEAN}\n", f"{CLEAN}\n")


def test_markup_is_text(capsys):
    show("[bold]x[/bold] :smile:")
    assert capsys.readouterr().out == "[bold]x[/bold] :smile:\n"


@pytest.mark.parametrize(("columns", "expected"), [("9", False), ("10", True), ("200", True)])
def test_whether_a_table_fits(monkeypatch, columns, expected):
    monkeypatch.setenv("COLUMNS", columns)
    table = new_table([("a", True), ("b", False)])
    table.add_row("1", "two six")
    assert fits(table) == expected


def test_the_packages_log_lines_are_said_while_a_command_runs(capsys):
    log = logging.getLogger("cdr_kernel.durable._durable_store")
    with log_on_stderr():
        log.warning("%s: read again", "a\x1b[2Jb")
        log.info("reading %d facts", 3)
        log.debug("nothing")
    log.info("nothing")
    assert capsys.readouterr().err == "warning: a\ufffd[2Jb: read again\nreading 3 facts\n"
