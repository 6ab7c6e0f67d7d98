"""The errors of the engine, the server and the commands.

    RadixKVError
    ├── RequestError                 the request is invalid; retrying it does not help
    │   ├── InvalidAdapter
    │   ├── InvalidRequest
    │   ├── InvalidCredential
    │   ├── NotPermitted
    │   ├── PromptTooLong
    │   ├── BeyondCeiling
    │   ├── UnknownAdapter
    │   ├── UnknownLease
    │   ├── UnknownPublicPrefix
    │   ├── UnknownEventNumber
    │   ├── UnknownTokenizer
    │   └── SwitchedOff
    ├── CapacityError                the service is full now; `retry_after_s` says when to retry
    │   ├── NoReplica
    │   ├── OutOfBlocks
    │   ├── OutOfMemory
    │   ├── QueueFull
    │   ├── RateExceeded
    │   ├── TooManyAdapters
    │   ├── TooManyReaders
    │   └── QuotaExceeded
    ├── LifecycleError               an object was used after its end, or a deadline passed
    │   ├── LeaseClosed
    │   ├── DoubleRelease
    │   ├── DeadlinePassed
    │   ├── Draining
    │   ├── EventsLost
    │   └── StepHangs
    ├── KVSourceError                K/V cannot be fetched from another server now
    │   ├── KVOfOtherPrompt
    │   └── KVSourceUnusable         retrying does not help
    │       └── KVFormatDiffers
    ├── ConfigError                  the service cannot start with this configuration
    │   └── UnsupportedModel
    ├── StoreError                   a call to a tier failed; requests continue without it
    │   ├── StoreBusy
    │   ├── StoreClosed
    │   ├── StoreLate
    │   ├── StorePaused
    │   └── StoreUnavailable
    ├── StepFailed                   a forward pass raised; its requests failed, the engine continues
    │   └── NotFinite
    └── InvariantViolation           a bug of radixkv

`radixkv.service.server.status` maps each to a gRPC status. Messages contain the field, the expected and the actual
value; they never contain token ids or another tenant's name.

Not in this tree: the exceptions of the clients (`radixkv.service.client.errors`), by gRPC status. A missing
package is a ModuleNotFoundError (`radixkv.service.missing_package`), and invalid arguments to a client raise ValueError
or TypeError. Exceptions that never leave a module or its package are defined there.
"""

from __future__ import annotations

import enum


class Cause(enum.Enum):
    """Why a call was rejected, where the status alone does not tell a client. The values are part of the protocol."""

    KV_SOURCE = "kv_source"  # K/V cannot be fetched from the server that holds the lease
    HOLD_LEASE = "hold_lease"  # the maximum number of held leases, or of blocks in them, is reached


class RadixKVError(Exception):
    """Root of this tree.

    Attributes:
        cause: see `Cause`; None where the class and the status are enough.
    """

    cause: Cause | None = None

    def __init__(self, message: str, *, cause: Cause | None = None) -> None:
        super().__init__(message)
        if cause is not None:
            self.cause = cause


class RequestError(RadixKVError):
    """The request is invalid. Retrying it does not help."""


class InvalidAdapter(RequestError):
    """The directory of an adapter cannot be read, needs something unsupported, or does not fit the model."""


class InvalidRequest(RequestError):
    """A field of the request has a value that is never allowed."""


class InvalidCredential(RequestError):
    """The client has no valid credentials."""


class NotPermitted(RequestError):
    """The client's credentials do not permit this call, or not for this tenant."""


class PromptTooLong(RequestError):
    """The prompt, or prompt and answer together, exceed the model's maximum length or the size of the block pool."""


class BeyondCeiling(RequestError):
    """The request needs more than its tenant's ceiling, so it can never be served with this configuration."""


class UnknownAdapter(RequestError):
    """No adapter of this name is loaded."""


class UnknownLease(RequestError):
    """The tenant has no usable lease with this id: it never existed, was released or purged, or has expired."""


class UnknownPublicPrefix(RequestError):
    """No public prefix of this name is registered."""


class UnknownEventNumber(RequestError):
    """Reading cannot continue from this event number: it is unknown, or the batches after it were discarded."""


class UnknownTokenizer(RequestError):
    """The served model has no tokenizer, so only token ids are accepted."""


class SwitchedOff(RequestError):
    """The service does not implement what the request needs, or it is disabled in the configuration."""


class CapacityError(RadixKVError):
    """The service is full now.

    Attributes:
        retry_after_s: a hint, in seconds, when to try again.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0, cause: Cause | None = None) -> None:
        super().__init__(message, cause=cause)
        self.retry_after_s = retry_after_s


class NoReplica(CapacityError):
    """No replica of the fleet can take the request."""


class OutOfBlocks(CapacityError):
    """Too few blocks are free or evictable, too many leases are held, or too many blocks are held or public."""


class OutOfMemory(CapacityError):
    """The device has too little memory to compute a single token."""


class QueueFull(CapacityError):
    """Too many requests are unfinished, in total or of one tenant, or too many calls wait for the engine."""


class RateExceeded(CapacityError):
    """The tenant exceeds its rate limit for requests or tokens. `retry_after_s` is exact."""


class TooManyAdapters(CapacityError):
    """Too many adapters are loaded, are loaded or still draining, or have been invoked since the server started."""


class TooManyReaders(CapacityError):
    """The maximum number of event subscribers is reached."""


class QuotaExceeded(CapacityError):
    """The tenant has as many blocks, held leases or blocks in held leases as its quota allows."""


class LifecycleError(RadixKVError):
    """An object was used after its end, or an operation did not finish in time."""


class LeaseClosed(LifecycleError):
    """A closed lease was used."""


class DoubleRelease(LifecycleError):
    """A block that is not leased was released."""


class DeadlinePassed(LifecycleError):
    """The deadline of the request passed before its result was known, or the request itself arrived too slowly."""


class Draining(LifecycleError):
    """The service is shutting down and takes no new requests."""


class EventsLost(LifecycleError):
    """An event subscriber fell too far behind: its next batch was discarded. It must start again with a snapshot."""


class StepHangs(LifecycleError):
    """A forward pass is stalled."""


class KVSourceError(RadixKVError):
    """Another server cannot be reached, or sends invalid K/V."""

    cause = Cause.KV_SOURCE


class KVOfOtherPrompt(KVSourceError):
    """The named lease has the K/V of another prompt."""


class KVSourceUnusable(KVSourceError):
    """K/V can never be fetched from another server with its configuration, or with the configuration of this server."""


class KVFormatDiffers(KVSourceUnusable):
    """The K/V of another server cannot be used: its model, dtype or block size differs."""


class ConfigError(RadixKVError):
    """The service cannot start with this configuration."""


class UnsupportedModel(ConfigError):
    """The model cannot be served with a prefix cache; the message names the reason."""


class StoreError(RadixKVError):
    """A call to a tier failed. Requests do not fail because of it."""


class StoreBusy(StoreError):
    """Too many calls wait for the tier."""


class StoreClosed(StoreError):
    """The tier was closed before the call began, or the call was cancelled."""


class StoreLate(StoreError):
    """The tier did not respond within its timeout."""


class StorePaused(StoreError):
    """The tier is not used for a while after failures."""


class StoreUnavailable(StoreError):
    """The tier cannot be reached or used."""


class StepFailed(RadixKVError):
    """A forward pass raised an exception. Its requests failed; the engine continues."""


class NotFinite(StepFailed):
    """The model computed NaN or infinity for a request. The request failed, and nothing of the step was published."""


class InvariantViolation(RadixKVError):
    """A bookkeeping invariant does not hold: a bug of radixkv."""


def require_invariant(subject: str, condition: bool, message: str) -> None:
    """Raise InvariantViolation with `subject: message` unless a condition holds."""
    if not condition:
        raise InvariantViolation(f"{subject}: {message}")
