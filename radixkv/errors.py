"""The errors of the engine, the server and the commands.

    RadixKVError
    ├── RequestError                 the request is wrong and would be wrong again
    │   ├── InvalidAdapter
    │   ├── InvalidRequest
    │   ├── InvalidCredential
    │   ├── NotPermitted
    │   ├── PromptTooLong
    │   ├── BeyondCeiling
    │   ├── UnknownAdapter
    │   ├── UnknownLease
    │   ├── UnknownPublicPrefix
    │   ├── UnknownSequence
    │   ├── UnknownTokenizer
    │   └── SwitchedOff
    ├── CapacityError                the service is full now; `retry_after_s` says when to come back
    │   ├── NoReplica
    │   ├── OutOfBlocks
    │   ├── OutOfMemory
    │   ├── QueueFull
    │   ├── RateExceeded
    │   ├── TooManyAdapters
    │   ├── TooManyReaders
    │   └── QuotaExceeded
    ├── LifecycleError               something was used outside its life
    │   ├── LeaseClosed
    │   ├── DoubleRelease
    │   ├── DeadlineExceeded
    │   ├── Draining
    │   ├── EventsLost
    │   └── StepHangs
    ├── KVSourceError                K/V can't be fetched from another server now
    │   └── KVFormatDiffers
    ├── ConfigError                  the service can't start like this
    │   └── UnsupportedModel
    ├── StoreError                   a store of blocks can't do this; requests go on without it
    │   ├── StoreBusy
    │   ├── StoreClosed
    │   ├── StoreLate
    │   ├── StorePaused
    │   └── StoreUnavailable
    ├── StepFailed                   a forward pass raised; the requests in it failed, the engine goes on
    │   └── NotFinite
    └── InvariantViolation           a bug of ours

`radixkv.service.server.status` maps each to a gRPC status. Messages name the field, what was expected and what came;
they never carry token ids or another tenant's name.

Not in this tree: the exceptions of the clients (`radixkv.service.client.errors`), one for each gRPC status. A missing
package is a ModuleNotFoundError (`radixkv.service.missing_package`), wrong arguments of a client are a ValueError or a
TypeError, and modules have exceptions of their own for what is caught nearby.
"""

from __future__ import annotations

import enum


class Cause(enum.Enum):
    """Why a call was refused, where programs go on differently than the status alone tells. Values are on the wire."""

    KV_SOURCE = "kv_source"  # the server that holds the lease
    HOLD_LEASE = "hold_lease"  # as many leases are held, or blocks in them, as may be


class RadixKVError(Exception):
    """Root of this tree.

    Attributes:
        cause: see `Cause`; None where class and status tell enough.
    """

    cause: Cause | None = None

    def __init__(self, message: str, *, cause: Cause | None = None) -> None:
        super().__init__(message)
        if cause is not None:
            self.cause = cause


class RequestError(RadixKVError):
    """The request is wrong and would be wrong again."""


class InvalidAdapter(RequestError):
    """An adapter's directory can't be read, asks for something that is not served, or does not fit the model."""


class InvalidRequest(RequestError):
    """A field of the request holds a value that is never allowed."""


class InvalidCredential(RequestError):
    """The caller shows no credential that this service knows."""


class NotPermitted(RequestError):
    """The caller's credential does not allow this call, or not for this tenant."""


class PromptTooLong(RequestError):
    """The prompt exceeds what the model or the whole block pool can hold."""


class BeyondCeiling(RequestError):
    """The request needs more than its tenant's ceiling. Only another configuration can let it pass."""


class UnknownAdapter(RequestError):
    """No adapter of this name is loaded."""


class UnknownLease(RequestError):
    """No held lease of this id belongs to this tenant: never given, released, or expired."""


class UnknownPublicPrefix(RequestError):
    """No public prefix of this name is registered."""


class UnknownSequence(RequestError):
    """No event batches follow this number: it is of another life of the service, or they are forgotten."""


class UnknownTokenizer(RequestError):
    """The served model has no tokenizer: it is served to callers who know its token ids."""


class SwitchedOff(RequestError):
    """The service does not implement what the request needs, or its configuration leaves it out."""


class CapacityError(RadixKVError):
    """The service is full now.

    Attributes:
        retry_after_s: a hint, in seconds, when to try again.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0, cause: Cause | None = None) -> None:
        super().__init__(message, cause=cause)
        self.retry_after_s = retry_after_s


class NoReplica(CapacityError):
    """No replica of the fleet may take the request."""


class OutOfBlocks(CapacityError):
    """Not enough free or evictable blocks, or no more that leases may keep."""


class OutOfMemory(CapacityError):
    """The device has no memory to compute a single token."""


class QueueFull(CapacityError):
    """Too many requests are unfinished, of all or of one tenant."""


class RateExceeded(CapacityError):
    """The tenant calls, or has tokens computed, faster than it may. `retry_after_s` is exact."""


class TooManyAdapters(CapacityError):
    """As many adapters are loaded, or drain, as may."""


class TooManyReaders(CapacityError):
    """As many readers follow the events as may."""


class QuotaExceeded(CapacityError):
    """The tenant is at its ceiling."""


class LifecycleError(RadixKVError):
    """Something was used outside its life."""


class LeaseClosed(LifecycleError):
    """A closed lease was asked to do more than close again."""


class DoubleRelease(LifecycleError):
    """A block was given back by somebody who does not hold it."""


class DeadlineExceeded(LifecycleError):
    """The request's deadline passed before its answer was known."""


class Draining(LifecycleError):
    """The service is shutting down and takes no new requests."""


class EventsLost(LifecycleError):
    """A reader of events fell behind: the next batch is forgotten. It has to begin again with a snapshot."""


class StepHangs(LifecycleError):
    """A forward pass does not come back."""


class KVSourceError(RadixKVError):
    """Another server can't be reached, or does not send K/V as it should."""

    cause = Cause.KV_SOURCE


class KVFormatDiffers(KVSourceError):
    """The K/V of another server is of no use here: its model, its dtypes or its block size are others."""


class ConfigError(RadixKVError):
    """The service can't start with this configuration."""


class UnsupportedModel(ConfigError):
    """The model can't be served with a prefix cache; the message names what stands in the way."""


class StoreError(RadixKVError):
    """A store of blocks outside the device can't do what it was asked. No request fails of it."""


class StoreBusy(StoreError):
    """As many calls wait for the store as may."""


class StoreClosed(StoreError):
    """The store was closed before the call began."""


class StoreLate(StoreError):
    """The store did not answer within its time limit."""


class StorePaused(StoreError):
    """The store is left alone for a while after it failed."""


class StoreUnavailable(StoreError):
    """The store can't be reached or used."""


class StepFailed(RadixKVError):
    """A forward pass raised. The requests in it failed; the engine goes on."""


class NotFinite(StepFailed):
    """The model computed NaN or infinite values for a request. It failed, and nothing of the step was published."""


class InvariantViolation(RadixKVError):
    """A bookkeeping invariant does not hold: a bug of radixkv."""


def require_invariant(subject: str, condition: bool, message: str) -> None:
    """Raise InvariantViolation with `subject: message` unless a condition holds."""
    if not condition:
        raise InvariantViolation(f"{subject}: {message}")
