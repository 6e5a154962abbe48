"""The executor's errors, without gRPC in them.

ExecutorError
├── StartupError         the service cannot start; one line says what to do
│   └── UnsupportedModel the model's architecture cannot be served
├── InvalidPlan          a plan broke the protocol: a fault of the scheduler
├── KvCheckFailed        the sanitizer found a slot that is not its reader's
├── DeviceLost           the device is beyond use: the process must end
├── NotReady             the model is still loading
└── ClaimRefused         a Run stream is not, or no longer, the owner's
    ├── InvalidRequest   bytes that are no message, or an epoch that cannot be one
    ├── StaleEpoch       another scheduler holds, or took, a higher epoch
    ├── ModelMismatch    the claim expects another model or block size
    ├── OutOfOrder       a plan was lost, repeated or reordered
    ├── ReaderStalled    the owner is connected and does not read its results
    └── Draining         the executor is shutting down

`servicer.py` maps them to gRPC status codes; a step's own errors travel in its
result and end no stream.
"""

from __future__ import annotations


class ExecutorError(Exception):
    """Base of all errors of this service."""


class StartupError(ExecutorError):
    """The service cannot start; the message is one line that says what to do."""


class UnsupportedModel(StartupError):
    """The model's architecture cannot be served from a paged KV cache."""


class InvalidPlan(ExecutorError):
    """A plan broke the protocol; the message names the field and what is wrong."""


class KvCheckFailed(ExecutorError):
    """A row would read a slot that is not its own; the message names both owners."""


class DeviceLost(ExecutorError):
    """The device answers every call with an error; only a new process helps."""


class NotReady(ExecutorError):
    """The model is still loading."""


class ClaimRefused(ExecutorError):
    """A Run stream may not go on."""


class InvalidRequest(ClaimRefused):
    """Bytes that are no message, or an epoch that cannot be one."""


class StaleEpoch(ClaimRefused):
    """Another scheduler holds, or took, a higher epoch."""


class ModelMismatch(ClaimRefused):
    """The claim expects another model or block size."""


class OutOfOrder(ClaimRefused):
    """previous_step_id was not the last step: a plan was lost or repeated."""


class Draining(ClaimRefused):
    """The executor is shutting down and takes no owner."""


class ReaderStalled(ClaimRefused):
    """The owner is connected and does not read its results."""
