"""Checksums by block: what has changed, and where."""

from __future__ import annotations

import json

import pytest

from cdr_kernel import checksums


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK", 16)
    (tmp_path / "long").write_bytes(bytes(range(40)))
    (tmp_path / "empty").write_bytes(b"")
    return tmp_path


def damage(folder, sums):
    files = checksums.opened(folder, sums)
    try:
        return checksums.damage(files, sums)
    finally:
        for file in files.values():
            file.close()


def test_every_change_is_found_with_its_block(folder):
    sums = checksums.of_folder(folder)
    assert {name: len(blocks) for name, blocks in sums.items()} == {"long": 3, "empty": 0}
    assert json.loads(json.dumps(sums)) == sums
    assert damage(folder, sums) is None
    good = (folder / "long").read_bytes()
    for at in range(40):
        (folder / "long").write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert damage(folder, sums) == f"{folder / 'long'}: block {at // 16} is not as it was written"
    (folder / "long").write_bytes(good[:32])
    assert damage(folder, sums) == f"{folder / 'long'}: expected 3 blocks, found 2"
    (folder / "long").write_bytes(good)
    (folder / "empty").write_bytes(b"x")
    assert damage(folder, sums) == f"{folder / 'empty'}: block 0 is not as it was written"


def test_a_file_that_is_gone_is_an_error(folder):
    sums = checksums.of_folder(folder)
    (folder / "long").unlink()
    with pytest.raises(FileNotFoundError):
        checksums.opened(folder, sums)


def test_codes_are_sealed_with_what_names_them(tmp_path):
    assert checksums.codes_damage(tmp_path) is None
    checksums.seal_codes(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "scan-0").mkdir()
    (tmp_path / "scan-0" / "first.npy").write_bytes(b"codes")
    (tmp_path / "scan.json").write_text('{"data": "scan-0", "alpha": "0x1.8p+0"}')
    assert "expected the checksums" in checksums.codes_damage(tmp_path)
    checksums.seal_codes(tmp_path)
    assert checksums.codes_damage(tmp_path) is None
    (tmp_path / "scan.json").write_text('{"data": "scan-0", "alpha": "0x1.9p+0"}')
    assert checksums.codes_damage(tmp_path) == f"{tmp_path / 'scan.json'}: not as it was written"
    checksums.seal_codes(tmp_path)
    (tmp_path / "scan-0" / "first.npy").write_bytes(b"Codes")
    assert "first.npy: block 0" in checksums.codes_damage(tmp_path)
    checksums.drop_codes(tmp_path)
    assert checksums.codes_damage(tmp_path) is None
