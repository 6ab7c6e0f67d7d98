"""The context and the task of a call, and callbacks that run when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc.aio

Context = grpc.aio.ServicerContext[Any, Any]


def add_done_callback(callback: Callable[[], object]) -> None:
    """Call `callback()` when the current call has ended. Must be called in the task of the call.

    gRPC's own `ServicerContext.add_done_callback` leaves a reference cycle through the call, which only the garbage
    collector frees.
    """
    current_call().add_done_callback(partial(_call_without_task, callback))


def current_call() -> asyncio.Task[Any]:
    """Return the task of the current call, which ends after the call's status was sent."""
    task = asyncio.current_task()
    assert task is not None, "gRPC runs each call as a task"
    return task


def _call_without_task(callback: Callable[[], object], _task: object) -> None:
    callback()
