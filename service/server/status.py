"""Maps exceptions to gRPC statuses and trailing metadata."""

from __future__ import annotations

import math

import grpc

from radixkv.errors import (
    BeyondCeiling,
    CapacityError,
    ConfigError,
    DeadlinePassed,
    Draining,
    EventsLost,
    InvalidCredential,
    InvariantViolation,
    KVOfOtherPrompt,
    KVSourceError,
    KVSourceUnusable,
    LifecycleError,
    NoReplica,
    NotPermitted,
    RadixKVError,
    RequestError,
    StepFailed,
    StepHangs,
    StoreError,
    SwitchedOff,
    UnknownAdapter,
    UnknownEventNumber,
    UnknownLease,
    UnknownPublicPrefix,
    UnknownTokenizer,
)
from radixkv.service.client.errors import CAUSE_KEY, RETRY_AFTER_KEY

# A class that is not in the table has the status of its nearest ancestor.
STATUS: dict[type[RadixKVError], grpc.StatusCode] = {
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    BeyondCeiling: grpc.StatusCode.FAILED_PRECONDITION,  # the request is valid, but a retry does not help
    InvalidCredential: grpc.StatusCode.UNAUTHENTICATED,
    NotPermitted: grpc.StatusCode.PERMISSION_DENIED,
    UnknownAdapter: grpc.StatusCode.NOT_FOUND,
    UnknownLease: grpc.StatusCode.NOT_FOUND,
    UnknownPublicPrefix: grpc.StatusCode.NOT_FOUND,
    UnknownEventNumber: grpc.StatusCode.OUT_OF_RANGE,
    UnknownTokenizer: grpc.StatusCode.NOT_FOUND,
    SwitchedOff: grpc.StatusCode.UNIMPLEMENTED,
    CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NoReplica: grpc.StatusCode.UNAVAILABLE,
    LifecycleError: grpc.StatusCode.INTERNAL,  # the service misused an object of its own
    DeadlinePassed: grpc.StatusCode.DEADLINE_EXCEEDED,
    Draining: grpc.StatusCode.UNAVAILABLE,
    KVSourceError: grpc.StatusCode.UNAVAILABLE,
    KVOfOtherPrompt: grpc.StatusCode.INVALID_ARGUMENT,
    KVSourceUnusable: grpc.StatusCode.FAILED_PRECONDITION,
    EventsLost: grpc.StatusCode.DATA_LOSS,
    StepHangs: grpc.StatusCode.UNAVAILABLE,
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    StepFailed: grpc.StatusCode.INTERNAL,
    StoreError: grpc.StatusCode.UNAVAILABLE,  # requests don't fail with it; they continue without the store
    InvariantViolation: grpc.StatusCode.INTERNAL,
}


def status_of(error: BaseException) -> grpc.StatusCode:
    """Return the gRPC status of an exception: that of its class, or of the nearest ancestor in the table.

    An exception that radixkv does not raise on purpose is INTERNAL.
    """
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return grpc.StatusCode.INTERNAL


def trailing_metadata_of(error: RadixKVError) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata of an error.

    It has `retry-after-ms`, in whole milliseconds rounded up, if the service is full, and `radixkv-cause` if the error
    has a cause.
    """
    metadata: tuple[tuple[str, str], ...] = ()
    if isinstance(error, CapacityError):
        metadata = ((RETRY_AFTER_KEY, str(max(0, math.ceil(error.retry_after_s * 1000)))),)
    return metadata if error.cause is None else (*metadata, (CAUSE_KEY, error.cause.value))
