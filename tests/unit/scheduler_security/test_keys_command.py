"""Tests of `octavo keys` and of the changes that it makes to a file."""

from __future__ import annotations

import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from scheduler_svc.security.cli import main
from scheduler_svc.security.key_file import add_key, revoke_key
from scheduler_svc.security.keys import KeysError, parse_keys


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_new_key_is_printed_once_and_kept_as_a_hash(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The key alone is on stdout, and not in the file, which only its owner reads."""
    code, out, err = run(capsys, "new", "--tenant", "team a", "--name", "ci", "--file", str(path))
    assert code == 0
    key = out.strip()
    assert out == f"{key}\n"
    assert key not in err
    text = path.read_text()
    assert key not in text
    found = parse_keys(text).find(key)
    assert found is not None and (found.name, found.tenant, found.admin) == ("ci", "team a", False)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_keys_are_listed_and_revoked(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By name; the hash's begin tells which is which, the key is not shown."""
    for name, kind in (("one", ()), ("two", ("--admin",))):
        options = ("--tenant", "t", "--name", name, "--file", str(path), *kind)
        assert run(capsys, "new", *options)[0] == 0
    code, out, _ = run(capsys, "list", "--file", str(path))
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["NAME", "TENANT", "KIND", "HASH"]
    assert [row[:3] for row in rows[1:]] == [["one", "t", "user"], ["two", "t", "admin"]]
    assert run(capsys, "revoke", "one", "--file", str(path))[0] == 0
    assert [key.name for key in parse_keys(path.read_text()).keys.values()] == ["two"]
    code, _, err = run(capsys, "revoke", "one", "--file", str(path))
    assert code == 1
    assert "no key named 'one'" in err
    assert run(capsys, "revoke", "two", "--file", str(path))[0] == 0
    assert run(capsys, "list", "--file", str(path))[:2] == (0, "")


def test_what_people_wrote_stays(path: Path) -> None:
    """Comments, order and limits survive a new key and a revoked one."""
    path.write_text(
        "# our keys\n"
        "[tenants.a]  # the big one\n"
        "max_concurrent_requests = 4\n"
    )  # fmt: skip
    key = add_key(path, name="k", tenant="a", admin=False)
    text = path.read_text()
    assert text.startswith("# our keys\n[tenants.a]  # the big one\n")
    ring = parse_keys(text)
    assert ring.find(key) is not None
    assert ring.limits_of("a").max_concurrent_requests == 4
    path.write_text(f"{text}\n[tenants.b]\nmax_requests_per_minute = 2\n")
    second = add_key(path, name="l", tenant="b", admin=True)
    revoke_key(path, "k")
    ring = parse_keys(path.read_text())
    assert ring.find(key) is None
    assert ring.find(second) is not None
    assert ring.limits_of("b").max_requests_per_minute == 2


def test_keys_in_one_line_are_changed_too(path: Path) -> None:
    """TOML has a second form of the same list."""
    path.write_text(f'keys = [{{name = "a", tenant = "t", hash = "sha256:{"0" * 64}"}}]\n')
    key = add_key(path, name="b", tenant="t", admin=False)
    assert len(parse_keys(path.read_text()).keys) == 2
    revoke_key(path, "a")
    assert parse_keys(path.read_text()).find(key) is not None


def test_a_file_keeps_its_mode_and_its_link(path: Path, tmp_path: Path) -> None:
    """An operator may have opened it to the service's group, and linked to it."""
    add_key(path, name="a", tenant="t", admin=False)
    path.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    add_key(link, name="b", tenant="t", admin=False)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert len(parse_keys(path.read_text()).keys) == 2


@pytest.mark.parametrize("field", [{"name": "a b"}, {"tenant": ""}, {"name": "taken"}])
def test_a_refused_change_changes_nothing(path: Path, field: dict[str, str]) -> None:
    """The file stays as it was, and nothing is left beside it."""
    add_key(path, name="taken", tenant="t", admin=False)
    before = path.read_text()
    with pytest.raises(KeysError):
        add_key(path, **{"name": "new", "tenant": "t", **field}, admin=False)  # type: ignore[arg-type]
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_broken_file_is_not_touched(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says what is wrong with it."""
    path.write_text("[[keys]")
    code, out, err = run(capsys, "new", "--tenant", "t", "--file", str(path))
    assert (code, out) == (1, "")
    assert err.startswith(f"octavo keys: {path} cannot be changed: is no TOML")
    assert len(err.splitlines()) == 1
    assert path.read_text() == "[[keys]"


def test_a_missing_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It names the folder."""
    code, _, err = run(capsys, "new", "--tenant", "t", "--file", str(tmp_path / "no" / "k.toml"))
    assert code == 1
    assert str(tmp_path / "no") in err
    assert len(err.splitlines()) == 1


def test_a_wrong_command_line_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """It names what is missing, and where to read on."""
    assert main(["new"]) == 2
    err = capsys.readouterr().err
    assert err == "octavo keys: Missing option '--tenant'. (see octavo keys new --help)\n"


def test_changes_at_once_are_all_kept(path: Path) -> None:
    """Each waits for the one before."""
    threads = [
        threading.Thread(
            target=add_key, args=(path,), kwargs={"name": f"k{n}", "tenant": "t", "admin": False}
        )
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(parse_keys(path.read_text()).keys) == 8


def test_the_command_needs_neither_grpc_nor_a_model(path: Path) -> None:
    """It is found by its entry point, and starts quickly."""
    code = (
        "import sys; from octavo_client.cli import main;"
        f"code = main(['keys', 'new', '--tenant', 't', '--file', {str(path)!r}]);"
        "heavy = {'grpc', 'tokenizers', 'jinja2', 'torch', 'rich'};"
        "print('LOADED', sorted(heavy & set(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "LOADED []" in done.stdout
