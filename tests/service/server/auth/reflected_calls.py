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
    request: Any  # the class of its request messages
    is_request_stream: bool
    is_response_stream: bool


async def described_methods(channel: grpc.aio.Channel, metadata=None) -> list[Method]:
    """Return every method of every service that reflection lists."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(metadata=metadata, timeout=PATIENCE_S)

    async def ask_reflection(**question):
        await call.write(reflection_pb2.ServerReflectionRequest(**question))
        return await call.read()

    listed = await ask_reflection(list_services="")
    files: dict[str, descriptor_pb2.FileDescriptorProto] = {}
    names = [service.name for service in listed.list_services_response.service]
    for name in names:
        described = await ask_reflection(file_containing_symbol=name)
        for encoded_file in described.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(encoded_file)
            files[file.name] = file
    await call.done_writing()
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()

    def add_with_dependencies(name: str) -> None:
        if name not in added:
            added.add(name)
            for dependency in files[name].dependency:
                add_with_dependencies(dependency)
            pool.Add(files[name])

    for name in list(files):
        add_with_dependencies(name)
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


_MAX_ATTEMPTS = 5
# Statuses with which the client itself may end a call, in place of the server's. It ends a call with INTERNAL, for
# example, if it writes to a stream that has just ended.
_STATUSES_OF_CLIENT = {
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNAVAILABLE,
}


async def status_of_call(channel: grpc.aio.Channel, method: Method, request: Any, metadata=None) -> grpc.StatusCode:
    """Call a method, and return its status; OK as soon as a stream has sent a response.

    If the client is still writing when the server refuses its stream, the server's status may get lost. Such calls are
    repeated.
    """
    for _ in range(_MAX_ATTEMPTS):
        status = await _status_once(channel, method, request, metadata)
        if status not in _STATUSES_OF_CLIENT:
            break
    return status


async def _status_once(channel: grpc.aio.Channel, method: Method, request: Any, metadata: Any) -> grpc.StatusCode:
    make_method = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, True): channel.stream_stream,
    }[method.is_request_stream, method.is_response_stream]
    start_call = make_method(method.path, request_serializer=lambda message: message.SerializeToString())
    if method.is_request_stream:
        call = start_call(metadata=metadata)
        sending = asyncio.ensure_future(_send(call, request))
    else:
        call = start_call(request, metadata=metadata)
        sending = None
    try:
        if method.is_response_stream:
            await asyncio.wait_for(call.read(), PATIENCE_S)
        else:
            await asyncio.wait_for(call, PATIENCE_S)
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        call.cancel()
        if sending is not None:
            await asyncio.gather(sending, return_exceptions=True)
    return grpc.StatusCode.OK


async def _send(call, request) -> None:
    await call.write(request)
    await call.done_writing()
