"""The model store: a folder with one ordinary Hugging Face folder per model.

    store/
      smollm2-135m-instruct/     config.json  model.safetensors  tokenizer.json  …
      .locks/  .partial/         work in progress; never read as a model

A model is in the store or it is not: it is built beside its place and renamed.
Asking for one that is there reads a few names and imports neither torch nor
transformers, so that both services and the command line start at once.
"""

from executor_svc.model_store._folder import ModelInfo, describe, missing_files
from executor_svc.model_store._progress import Progress, Silent
from executor_svc.model_store._store import (
    DEFAULT_MODEL,
    default_store,
    list_models,
    resolve,
)
from executor_svc.model_store.errors import ModelStoreError

__all__ = [
    "DEFAULT_MODEL",
    "ModelInfo",
    "ModelStoreError",
    "Progress",
    "Silent",
    "default_store",
    "describe",
    "list_models",
    "missing_files",
    "resolve",
]
