"""Calls methods that a server describes by reflection, without generated code."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.patience import PATIENCE_S


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC as the server describes it."""

    path: str
    request: Any  # a class of messages
    is_request_stream: bool
    is_response_stream: bool


async def described_methods(channel: grpc.aio.Channel, metadata=None) -> list[Method]:
    """Return every method of every service that reflection lists."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(metadata=metadata, timeout=PATIENCE_S)

    async def ask(**question):
        await call.write(reflection_pb2.ServerReflectionRequest(**question))
        return await call.read()

    listed = await ask(list_services="")
    files: dict[str, descriptor_pb2.FileDescriptorProto] = {}
    names = [service.name for service in listed.list_services_response.service]
    for name in names:
        answer = await ask(file_containing_symbol=name)
        for data in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            files[file.name] = file
    await call.done_writing()
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()

    def add(name: str) -> None:
        if name not in added:
            added.add(name)
            for needed in files[name].dependency:
                add(needed)
            pool.Add(files[name])

    for name in list(files):
        add(name)
    return [
        Method(
            f"/{name}/{method.name}",
            message_factory.GetMessageClass(method.input_type),
            method.client_streaming,
            method.server_streaming,
        )
        for name in names
        for method in pool.FindServiceByName(name).methods
    ]


_MOST_ASKED = 5
# Statuses that a client gives to a call by itself: INTERNAL if it writes to a stream that has just ended.
_LOST = {grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}


async def status_of_call(channel: grpc.aio.Channel, method: Method, request: Any, metadata=None) -> grpc.StatusCode:
    """Call a method, and return its status; OK once a stream has sent something.

    A client that still writes when the server refuses its stream may lose the status, and asks again.
    """
    for _ in range(_MOST_ASKED):
        status = await _status_once(channel, method, request, metadata)
        if status not in _LOST:
            break
    return status


async def _status_once(channel: grpc.aio.Channel, method: Method, request: Any, metadata: Any) -> grpc.StatusCode:
    kind = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, True): channel.stream_stream,
    }[method.is_request_stream, method.is_response_stream]
    start = kind(method.path, request_serializer=lambda message: message.SerializeToString())
    if method.is_request_stream:
        call = start(metadata=metadata)
        with_request = asyncio.ensure_future(_send(call, request))
    else:
        call = start(request, metadata=metadata)
        with_request = None
    try:
        if method.is_response_stream:
            await asyncio.wait_for(call.read(), PATIENCE_S)
        else:
            await asyncio.wait_for(call, PATIENCE_S)
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        call.cancel()
        if with_request is not None:
            await asyncio.gather(with_request, return_exceptions=True)
    return grpc.StatusCode.OK


async def _send(call, request) -> None:
    await call.write(request)
    await call.done_writing()
