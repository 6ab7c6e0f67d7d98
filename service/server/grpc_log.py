"""Drops records from the log of gRPC that any client can cause, without credentials and as often as it likes."""

from __future__ import annotations

import logging

_LOGGER = "grpc._cython.cygrpc"

# A response that can't be delivered because the client has disconnected, and metadata that is not UTF-8. The latter
# comes with a traceback and repeats the value, which may be that of `authorization`.
_CAUSED_BY_CLIENTS = ("ExecuteBatchError raised in core", "Invalid encoding on")


def drop_records_of_clients() -> None:
    """Drop the records that clients can cause from now on. Records of exceptions in handlers are kept."""
    logging.getLogger(_LOGGER).addFilter(is_kept)  # has no effect from the second call on


def is_kept(record: logging.LogRecord) -> bool:
    """Return whether a record of gRPC's logger is kept."""
    return not record.getMessage().startswith(_CAUSED_BY_CLIENTS)
