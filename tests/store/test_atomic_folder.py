from __future__ import annotations

import contextlib
import json
import os
import threading
from dataclasses import replace

import pytest
from fact_stores import reseal

from cdr_kernel.exceptions import DamagedFileError
from cdr_kernel.store import _atomic_folder as folder_module
from cdr_kernel.store._atomic_folder import LOCK, Kind, draft, draft_folder, identity_of

KIND = Kind("thing", file="thing.json", data="thing-", format="thing", version=1, fields={"n": int})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def writing(text):
    def write(data):
        (data / "text").write_text(text)
        return {"n": 1}

    return write


def failing(data):
    (data / "text").write_text("half")
    raise KeyboardInterrupt


def saved(folder):
    (data,) = folder.glob("thing-*")
    assert data.name in (folder / "thing.json").read_text()
    return (data / "text").read_text()


def test_a_save_replaces_the_one_before_and_leaves_other_files_alone(tmp_path):
    KIND.save(tmp_path / "a" / "b", writing("one"))
    folder = tmp_path / "a" / "b"
    for theirs in ("thing-mine", "thing.json.bak", "other-0123456789abcdef"):
        (folder / theirs).mkdir()
    (folder / "thing-0123456789abcdef").mkdir()  # as killed saves leave them
    (folder / "thing.json.thing-0123456789abcdef").write_text("")
    KIND.save(folder, writing("two"))
    (data,) = (path for path in folder.glob("thing-*") if path.name != "thing-mine")
    assert (data / "text").read_text() == "two"
    assert names(folder) == sorted(
        [LOCK, "thing.json", data.name, "thing-mine", "thing.json.bak", "other-0123456789abcdef"]
    )


def test_a_failed_save_takes_away_only_what_is_its_own(tmp_path):
    new = tmp_path / "new"
    with pytest.raises(KeyboardInterrupt):
        KIND.save(new, failing)
    assert not new.exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(KeyboardInterrupt):
        KIND.save(tmp_path / "empty", failing)
    assert names(tmp_path / "empty") == []

    def joined(data):
        (new / "theirs").write_text("")
        failing(data)

    with pytest.raises(KeyboardInterrupt):
        KIND.save(new, joined)
    assert names(new) == [LOCK, "theirs"]


def test_an_interrupt_after_the_manifest_is_in_place_keeps_the_new(tmp_path, monkeypatch):
    KIND.save(tmp_path, writing("one"))
    replace = os.replace

    def replace_and_stop(*paths):
        replace(*paths)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace_and_stop)
    with pytest.raises(KeyboardInterrupt):
        KIND.save(tmp_path, writing("two"))
    monkeypatch.undo()
    assert sorted((data / "text").read_text() for data in tmp_path.glob("thing-*")) == ["one", "two"]
    calls = []

    def sync(folder):
        calls.append(folder)
        if len(calls) == 2:  # that of the folder, once the manifest is in place
            raise OSError("disk gone")

    monkeypatch.setattr(folder_module, "sync_folder", sync)
    with pytest.raises(OSError, match="disk gone"):
        KIND.save(tmp_path, writing("three"))
    monkeypatch.undo()
    KIND.save(tmp_path, writing("four"))
    assert saved(tmp_path) == "four"


def test_who_waits_for_a_first_save_that_fails_saves_all_the_same(tmp_path):
    folder = tmp_path / "new"
    other = threading.Thread(target=KIND.save, args=(folder, writing("other")))

    def fail_late(data):
        other.start()
        other.join(0.2)
        assert other.is_alive()  # it waits
        failing(data)

    with pytest.raises(KeyboardInterrupt):
        KIND.save(folder, fail_late)
    other.join()
    assert saved(folder) == "other"


def test_where_there_are_no_locks_saves_go_on_without(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "fcntl", None)
    KIND.save(tmp_path, writing("one"))
    monkeypatch.undo()
    if folder_module.fcntl is None:
        return
    for number, message in ((folder_module.errno.ENOLCK, None), (folder_module.errno.EIO, "I/O")):

        def flock(*_, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(folder_module.fcntl, "flock", flock)
        if message is None:
            KIND.save(tmp_path, writing("two"))
        else:
            with pytest.raises(OSError, match=os.strerror(number)):
                KIND.save(tmp_path, writing("three"))
        monkeypatch.undo()
    assert saved(tmp_path) == "two"


def test_a_lock_that_never_stays_is_an_error(tmp_path, monkeypatch):
    (tmp_path / LOCK).symlink_to(tmp_path / "nowhere" / "lock")
    with pytest.raises(OSError, match="expected a lock that stays"):
        KIND.save(tmp_path, writing("one"))


def test_a_load_whose_data_is_swept_up_reads_the_newer(tmp_path):
    KIND.save(tmp_path, writing("0"))
    seen = []

    def read(manifest):
        seen.append(manifest["data"])
        if len(seen) < 4:
            KIND.save(tmp_path, writing(str(len(seen))))
        return (tmp_path / manifest["data"] / "text").read_text()

    assert KIND.load(tmp_path, read) == "3"
    assert len(set(seen)) == 4


def test_a_load_ends_where_data_is_missing_or_replaced_for_ever(tmp_path):
    KIND.save(tmp_path, writing("0"))
    seen = []

    def read(manifest, save=True):
        seen.append(manifest["data"])
        if save:
            KIND.save(tmp_path, writing("again"))
        raise FileNotFoundError(manifest["data"])

    with pytest.raises(FileNotFoundError):
        KIND.load(tmp_path, read)
    assert len(seen) == 100
    seen.clear()
    with pytest.raises(FileNotFoundError):
        KIND.load(tmp_path, lambda manifest: read(manifest, save=False))
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": True}, "expected n to be int, found True"),
        ({"n": 1.0}, "expected n to be int"),
        ({"n": -1}, "expected n to be int, found -1"),
        ({"n": 2**63}, "expected n to be int"),
        ({"n": None}, "expected n to be int"),
        ({"format": "other"}, "expected a manifest of format 'thing'"),
        ({"format_version": True}, "format version True, this version reads 1"),
        ({"format_version": 2}, "format version 2"),
        ({"data": ""}, "expected data to name a subfolder, found ''"),
        ({"data": "."}, "name a subfolder"),
        ({"data": "../thing-0123456789abcdef"}, "name a subfolder"),
        ({"data": "thing-\0"}, "name a subfolder"),
        ({"data": 5}, "name a subfolder"),
    ],
)
def test_a_damaged_manifest(tmp_path, change, message):
    KIND.save(tmp_path, writing("one"))
    good = json.loads((tmp_path / "thing.json").read_bytes())
    assert KIND.manifest(tmp_path) == good
    changed = good | change
    (tmp_path / "thing.json").write_text(json.dumps({**changed, "identity": identity_of(changed)}))
    with pytest.raises(ValueError, match=message):
        KIND.manifest(tmp_path)
    if "format" not in message:
        (tmp_path / "thing.json").write_text(json.dumps(changed))
        with pytest.raises(DamagedFileError, match=r"thing\.json: not as it was written"):
            KIND.manifest(tmp_path)


def test_every_save_has_an_identity_of_its_own(tmp_path):
    seen = []
    for text in ("one", "one", "two"):
        KIND.save(tmp_path, writing(text))
        found = KIND.manifest(tmp_path)
        assert found["files"] == {"text": {"bytes": 3, "crc32c": found["files"]["text"]["crc32c"]}}
        seen.append((found["identity"], found["files"]["text"]["crc32c"]))
    assert len({identity for identity, _ in seen}) == 3
    assert seen[0][1] == seen[1][1] != seen[2][1]


def test_a_flipped_bit_of_a_manifest_is_found_or_means_nothing(tmp_path):
    KIND.save(tmp_path, writing("one"))
    path = tmp_path / "thing.json"
    good, told = path.read_bytes(), KIND.manifest(tmp_path)
    for at in range(len(good)):
        for bit in range(8):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
            with contextlib.suppress(ValueError):
                assert KIND.manifest(tmp_path) == told


def test_what_is_made_of_the_saved_thing_goes_with_it(tmp_path):
    kind = replace(KIND, derived=r"more\.json|more-[0-9a-f]{4}")
    kind.save(tmp_path, writing("one"))
    (tmp_path / "more.json").write_text("")
    (tmp_path / "more-00ff").mkdir()
    (tmp_path / "more-mine").mkdir()
    kind.save(tmp_path, writing("two"))
    assert {name for name in names(tmp_path) if name.startswith("more")} == {"more-mine"}


@pytest.mark.parametrize("raw", [b"", b"{", b"[" * 200000, b'{"a":' * 200000, b"\xff\xfe\0", b"9" * 5000])
def test_a_manifest_that_is_no_json(tmp_path, raw):
    (tmp_path / "thing.json").write_bytes(raw)
    with pytest.raises(ValueError, match=r"thing\.json: not readable JSON"):
        KIND.manifest(tmp_path)


@pytest.mark.skipif(folder_module.fcntl is None, reason="needs locks of files")
def test_drafts_of_killed_processes_are_taken_away_and_those_at_work_stay(tmp_path):
    target, other = tmp_path / "run.json", tmp_path / ".cdr-mine"
    other.write_text("")
    (tmp_path / ".cdr-0123456789abcdef").write_text("half")
    (tmp_path / ".run.json.0123456789abcdef").mkdir()
    (tmp_path / ".run.json.0123456789abcdef" / "half").write_text("half")
    (tmp_path / ".other.0123456789abcdef").mkdir()
    with draft(target) as first, draft(target) as second:
        assert names(tmp_path) == sorted(
            [first.name, second.name, other.name, ".run.json.0123456789abcdef", ".other.0123456789abcdef"]
        )
        with draft_folder(target) as third, draft_folder(target) as fourth:
            expected = [first.name, second.name, third.name, fourth.name, other.name, ".other.0123456789abcdef"]
            assert names(tmp_path) == sorted(expected)
            os.replace(first, target)
            (third / "half").write_text("half")
    assert names(tmp_path) == [".cdr-mine", ".other.0123456789abcdef", "run.json"]


@pytest.mark.skipif(folder_module.fcntl is None, reason="needs locks of files")
def test_a_draft_that_is_swept_up_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    flock, gone = folder_module.fcntl.flock, []

    def late(handle, how):
        if not gone and how == folder_module.fcntl.LOCK_EX:
            gone.extend(tmp_path.glob(".cdr-*"))
            gone[0].unlink()
        flock(handle, how)

    monkeypatch.setattr(folder_module.fcntl, "flock", late)
    with draft(tmp_path / "run.json") as path:
        assert path.exists()
        assert path != gone[0]


@pytest.mark.parametrize("alone", [True, False])
def test_what_killed_saves_left_goes_before_the_next_one_needs_the_room(tmp_path, monkeypatch, alone):
    KIND.save(tmp_path, writing("one"))
    left = [tmp_path / "thing-0123456789abcdef", tmp_path / "thing-0123456789abcdef.beside"]
    for folder in left:
        folder.mkdir()
    if not alone:  # somebody else may be at work on them
        monkeypatch.setattr(folder_module, "fcntl", None)
    there = []
    KIND.save(tmp_path, lambda data: there.extend(each.exists() for each in left) or writing("two")(data))
    assert there == [not alone] * 2
    assert saved(tmp_path) == "two"


def test_where_the_manifest_cannot_be_read_nothing_is_taken_away(tmp_path):
    KIND.save(tmp_path, writing("one"))
    (tmp_path / "thing.json").write_text("{")
    with pytest.raises(KeyboardInterrupt):
        KIND.save(tmp_path, failing)
    assert [(data / "text").read_text() for data in tmp_path.glob("thing-*")] == ["one"]


@pytest.mark.parametrize("beside", ["a", [1], [""], ["."], [".."], ["a/b"], ["a\0"]])
def test_names_of_files_beside_are_checked(tmp_path, beside):
    KIND.save(tmp_path, writing("one"))
    reseal(tmp_path / "thing.json", beside=beside)
    with pytest.raises(ValueError, match="expected beside to name files"):
        KIND.manifest(tmp_path)


def test_a_folder_in_the_place_of_a_file_is_refused_before_anything_is_changed(tmp_path):
    KIND.save(tmp_path, writing("one"), {"a": b"1"})
    (tmp_path / "b").mkdir()
    with pytest.raises(FileExistsError, match="b: expected a file to write to, found a folder"):
        KIND.save(tmp_path, writing("two"), {"a": b"2", "b": b"2"})
    assert (saved(tmp_path), (tmp_path / "a").read_bytes()) == ("one", b"1")
