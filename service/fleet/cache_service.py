"""Methods of CacheService that a fleet implements.

Stats, Statement, Diagnose, Purge, EndSession and Hint are called on all replicas, and the responses are aggregated.
Explain is forwarded to the replica that would get the prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from radixkv.api.hints import HintAction
from radixkv.api.stats import DEFAULT_MAX_TENANTS
from radixkv.doctor.miss_profile import MissCounts
from radixkv.errors import InvalidRequest, NoReplica
from radixkv.service.fleet.forwarder import Forwarder, ReplicaRefusal
from radixkv.service.fleet.replica_connection import ReplicaConnection, ReplicaLost
from radixkv.service.fleet.servicers import call_options, call_without_load, replica_errors_as_status, routing_request
from radixkv.service.server.calls import Context
from radixkv.service.server.servicers.diagnoses import DEFAULT_MAX_CAUSES, MAX_CAUSES
from radixkv.service.server.servicers.messages import read_caller, read_hints, require_names
from radixkv.v1 import cache_pb2, hints_pb2

# Lists whose messages are added up by key: the field that is the key.
_KEY_OF_LIST = {"tenants": "tenant", "tiers": "tier"}
# Fields whose value is the same in all messages that are added up, so that it is copied.
_EQUAL_FIELDS = (
    "model",
    "device",
    "block_size",
    "block_bytes",
    "kv_dtype",
    "model_fingerprint",
    "bounds_s",
    "tenant",
    "tier",
    "period",
)
# Fields whose maximum is taken instead of their sum.
_MAX_FIELDS = ("uptime_s", "known_tenants")

ListReplicas = Callable[[], Awaitable[Sequence[ReplicaConnection]]]
"""Returns the connections to all replicas."""


class FleetCacheService:
    """Makes calls on all replicas concurrently, or on the one that would get a prompt.

    Args:
        list_replicas: returns the connections to all replicas.
        forwarder: forwards calls with a prompt, and chooses the replica that loads a prompt for a hint; if replicas
            have roles, among prefill replicas.
    """

    def __init__(self, list_replicas: ListReplicas, forwarder: Forwarder) -> None:
        self._list_replicas = list_replicas
        self._forwarder = forwarder

    @property
    def methods(self) -> Mapping[str, Callable[[Any, Context], Awaitable[Any]]]:
        """The methods of CacheService that a fleet implements."""
        return {
            "Purge": self.purge,
            "Stats": self.stats,
            "Statement": self.statement,
            "Diagnose": self.diagnose,
            "EndSession": self.end_session,
            "Hint": self.hint,
            "Explain": self.explain,
        }

    async def explain(self, request: cache_pb2.ExplainRequest, context: Context) -> cache_pb2.ExplainResponse:
        """Explain a prompt on the replica that would get it. Other replicas may have cached more of it."""
        response: cache_pb2.ExplainResponse = await call_without_load(
            self._forwarder,
            routing_request(request),
            lambda connection: connection.cache.Explain(request, **call_options(connection, context)),
            context,
        )
        return response

    async def purge(self, request: cache_pb2.PurgeRequest, context: Context) -> cache_pb2.PurgeResponse:
        """Purge namespaces on all replicas. The call succeeds only if it succeeds on each of them."""
        require_names(tenant=request.tenant, adapter=request.adapter, salt=request.salt)
        responses = await self._responses_of_all(
            lambda connection: connection.cache.Purge(request, **call_options(connection, context)), context
        )
        response = cache_pb2.PurgeResponse()
        deleted_by_store: dict[str, list[cache_pb2.DeletedBlocks]] = {}
        for replica_response in responses:
            response.freed_blocks += replica_response.freed_blocks
            response.pinned_blocks += replica_response.pinned_blocks
            for deleted in replica_response.stores:
                deleted_by_store.setdefault(deleted.store, []).append(deleted)
        for store, counts in deleted_by_store.items():
            is_known = all(each.HasField("blocks") for each in counts)
            blocks = sum(each.blocks for each in counts) if is_known else None
            response.stores.append(cache_pb2.DeletedBlocks(store=store, blocks=blocks))
        return response

    async def end_session(self, request: cache_pb2.EndSessionRequest, context: Context) -> cache_pb2.EndSessionResponse:
        """End a session on all replicas. The call succeeds only if it succeeds on each of them."""
        require_names(tenant=request.tenant, session_id=request.session_id)
        responses = await self._responses_of_all(
            lambda connection: connection.cache.EndSession(request, **call_options(connection, context)), context
        )
        return cache_pb2.EndSessionResponse(
            was_known=any(each.was_known for each in responses), blocks=sum(each.blocks for each in responses)
        )

    async def hint(self, request: cache_pb2.HintRequest, context: Context) -> cache_pb2.HintResponse:
        """Apply hints on all replicas. The call succeeds only if it succeeds on each of them.

        A replica refuses an action if nothing that the action addresses is cached there. A prompt is loaded only by the
        replica that would get it.
        """
        read_caller(request)
        are_prompt_loads = [is_prompt_load(action) for action in read_hints(request.kv_hints)]
        async with replica_errors_as_status(context):
            loader_address = ""  # of the replica that loads the prompt; if it is empty, all replicas get all actions
            if any(are_prompt_loads) and request.token_ids:
                routed = await self._forwarder.choose(routing_request(request))
                routed.finish(0)
                loader_address = routed.name

            def action_indices(address: str) -> list[int]:
                """Return the indices of the actions that a replica gets."""
                gets_loads = loader_address in ("", address)
                return [index for index, is_load in enumerate(are_prompt_loads) if gets_loads or not is_load]

            responses, failures = await self._call_all(
                lambda connection: connection.cache.Hint(
                    _with_actions(request, action_indices(connection.facts.address)),
                    **call_options(connection, context),
                ),
                only_address=loader_address if all(are_prompt_loads) else "",
            )
            if failures:
                raise _incomplete_error(failures, len(responses))
        outcomes_by_action: list[list[hints_pb2.HintOutcome]] = [[] for _ in are_prompt_loads]
        for address, response in responses.items():
            for index, outcome in zip(action_indices(address), response.hints, strict=True):
                outcomes_by_action[index].append(outcome)
        if not all(outcomes_by_action):
            raise NoReplica("replicas: the one that was to load the prompt has left the fleet, retry the call")
        return cache_pb2.HintResponse(hints=map(join_outcomes, outcomes_by_action))

    async def stats(self, request: cache_pb2.StatsRequest, context: Context) -> cache_pb2.StatsResponse:
        """Return the sum of the statistics of replicas that respond, and the statistics or error of each replica."""
        require_names(tenant=request.tenant)
        async with replica_errors_as_status(context):
            responses, failures = await self._call_all(
                lambda connection: connection.cache.Stats(request, **call_options(connection, context))
            )
            if not responses:
                raise _incomplete_error(failures, 0)
        max_tenants = request.max_tenants if request.HasField("max_tenants") else DEFAULT_MAX_TENANTS
        response = sum_stats(responses.values(), max_tenants, request.max_sessions)
        for address, replica_response in responses.items():
            response.replicas.add(address=address).stats.CopyFrom(replica_response)
        for address, failure in failures.items():
            response.replicas.add(address=address, error=_reason(failure))
        return response

    async def statement(self, request: cache_pb2.StatementRequest, context: Context) -> cache_pb2.StatementResponse:
        """Return the sum of the statements of all replicas. The call succeeds only if it succeeds on each of them."""
        require_names(tenant=request.tenant)
        responses = await self._responses_of_all(
            lambda connection: connection.cache.Statement(request, **call_options(connection, context)), context
        )
        # Adding up four statements of 10,000 lines takes 0.7 s.
        return await asyncio.to_thread(sum_statements, responses)

    async def diagnose(self, request: cache_pb2.DiagnoseRequest, context: Context) -> cache_pb2.DiagnoseResponse:
        """Return the causes of the misses of all replicas together. Replicas that examine no misses are left out."""
        require_names(tenant=request.tenant)
        replica_request = cache_pb2.DiagnoseRequest()
        replica_request.CopyFrom(request)
        replica_request.max_causes = MAX_CAUSES
        async with replica_errors_as_status(context):
            max_causes = request.max_causes if request.HasField("max_causes") else DEFAULT_MAX_CAUSES
            if max_causes > MAX_CAUSES:
                raise InvalidRequest(f"max_causes: expected at most {MAX_CAUSES}, got {max_causes}")
            responses, failures = await self._call_all(
                lambda connection: connection.cache.Diagnose(replica_request, **call_options(connection, context))
            )
            # Decode replicas, and replicas that examine no misses, do not implement the call. They are left out, unless
            # no replica implements the call.
            if responses:
                failures = {address: each for address, each in failures.items() if not _is_unimplemented(each)}
            if failures:
                raise _incomplete_error(failures, len(responses))
        return sum_diagnoses(responses.values(), max_causes)

    async def _responses_of_all(
        self, make_call: Callable[[ReplicaConnection], Awaitable[Any]], context: Context
    ) -> list[Any]:
        """Call each replica and return the responses. The call ends with an error unless all replicas succeed."""
        async with replica_errors_as_status(context):
            responses, failures = await self._call_all(make_call)
            if failures:
                raise _incomplete_error(failures, len(responses))
        return list(responses.values())

    async def _call_all(
        self, make_call: Callable[[ReplicaConnection], Awaitable[Any]], only_address: str = ""
    ) -> tuple[dict[str, Any], dict[str, grpc.aio.AioRpcError | ReplicaLost]]:
        """Call each replica, or only the one at `only_address`. Returns the responses and the failures by address.

        Raises:
            NoReplica: there is no replica, or not the one to call.
        """
        connections = [each for each in await self._list_replicas() if only_address in ("", each.facts.address)]
        if not connections:
            raise NoReplica("replicas: none is available")

        async def call(connection: ReplicaConnection) -> Any:
            """Return the response or the failure."""
            with connection.in_flight():
                try:
                    return await connection.wait_for(make_call(connection))
                except (grpc.aio.AioRpcError, ReplicaLost) as failure:
                    return failure

        responses: dict[str, Any] = {}
        failures: dict[str, grpc.aio.AioRpcError | ReplicaLost] = {}
        results = await asyncio.gather(*map(call, connections))
        for connection, result in zip(connections, results, strict=True):
            if isinstance(result, (grpc.aio.AioRpcError, ReplicaLost)):
                failures[connection.facts.address] = result
            else:
                responses[connection.facts.address] = result
        return responses, failures


def is_prompt_load(action: HintAction) -> bool:
    """Return whether an action loads the prompt of its request, rather than the prompts of a session."""
    return action.action_type == "kv.prefetch" and action.payload.get("session_id") is None


def join_outcomes(outcomes: Sequence[hints_pb2.HintOutcome]) -> hints_pb2.HintOutcome:
    """Join the outcomes of one action on at least one replica.

    Replicas on which nothing that the action addresses is cached are ignored, unless this applies to all of them. If
    the outcomes of the other replicas have one status, the joint status is this one, and otherwise clipped. The tokens
    are added up.
    """
    relevant = [each for each in outcomes if not each.is_missing] or outcomes
    statuses = {each.status for each in relevant}
    return hints_pb2.HintOutcome(
        action_id=relevant[0].action_id,
        status=statuses.pop() if len(statuses) == 1 else hints_pb2.HINT_CLIPPED,
        reason="; ".join(dict.fromkeys(each.reason for each in relevant if each.reason)),
        tokens=sum(each.tokens for each in relevant),
        is_missing=relevant[0].is_missing,
    )


def _with_actions(request: cache_pb2.HintRequest, indices: Sequence[int]) -> cache_pb2.HintRequest:
    """Return a request with only some of its actions."""
    if len(indices) == len(request.kv_hints.actions):
        return request
    partial_request = cache_pb2.HintRequest()
    partial_request.CopyFrom(request)
    del partial_request.kv_hints.actions[:]
    partial_request.kv_hints.actions.extend(request.kv_hints.actions[index] for index in indices)
    return partial_request


def sum_stats(
    responses: Iterable[cache_pb2.StatsResponse], max_tenants: int, max_sessions: int = 0
) -> cache_pb2.StatsResponse:
    """Add up the statistics of replicas.

    Namespaces and segments are counted once for each replica that has them. A fleet has no epoch. An optional number
    that one of the replicas omits, such as the bytes of a store, is omitted.

    Args:
        responses: the responses of the replicas, at least one.
        max_tenants: maximum number of tenants to list, those with the most blocks.
        max_sessions: maximum number of sessions to list, those used most recently. A session of several replicas is
            listed once for each.
    """
    parts = list(responses)
    total = cache_pb2.StatsResponse()
    _add(total, parts)
    total.ClearField("epoch")
    largest = sorted(total.tenants, key=lambda each: (-each.cached_blocks, each.tenant))[:max_tenants]
    latest = sorted((each for part in parts for each in part.sessions), key=lambda each: each.idle_s)[:max_sessions]
    listed = cache_pb2.StatsResponse(tenants=largest, sessions=latest)
    del total.tenants[:]
    total.MergeFrom(listed)
    return total


def sum_statements(responses: Iterable[cache_pb2.StatementResponse]) -> cache_pb2.StatementResponse:
    """Add up the statements of at least one replica. The seconds that were accounted are added up as well."""
    parts = list(responses)
    total = cache_pb2.StatementResponse(since=parts[0].since, until=parts[0].until)
    total.covered_s = sum(each.covered_s for each in parts)
    lines: dict[tuple[str, str], list[Message]] = {}
    for part in parts:
        for line in part.lines:
            lines.setdefault((line.period, line.tenant), []).append(line)
    for key in sorted(lines):
        _add(total.lines.add(), lines[key])
    return total


def sum_diagnoses(responses: Iterable[cache_pb2.DiagnoseResponse], max_causes: int) -> cache_pb2.DiagnoseResponse:
    """Add up the causes of misses of replicas. Each replica compares a prompt only with what it has cached itself.

    Args:
        responses: the responses of the replicas. Their causes are changed in place.
        max_causes: maximum number of causes to list.
    """
    total = cache_pb2.DiagnoseResponse()
    causes: dict[tuple[str, ...], cache_pb2.DiagnosedCause] = {}
    for part in responses:
        total.covered_s = max(total.covered_s, part.covered_s)
        for name in MissCounts._fields:
            setattr(total, name, getattr(total, name) + getattr(part, name))
        total.further_causes += part.further_causes
        for each in part.causes:
            merged = causes.setdefault((each.tenant, each.cause, each.place, each.pattern), each)
            if merged is not each:
                merged.prompts += each.prompts
                merged.lost_tokens += each.lost_tokens
                merged.min_position = min(merged.min_position, each.min_position)
                merged.max_position = max(merged.max_position, each.max_position)
                merged.is_upper_bound |= each.is_upper_bound
                if merged.HasField("lost_s") and each.HasField("lost_s"):
                    merged.lost_s += each.lost_s
                else:
                    merged.ClearField("lost_s")
    ranked = sorted(causes.values(), key=lambda each: each.lost_tokens, reverse=True)
    total.causes.extend(ranked[:max_causes])
    total.further_causes += len(ranked[max_causes:])
    return total


def _incomplete_error(failures: Mapping[str, grpc.aio.AioRpcError | ReplicaLost], num_done: int) -> ReplicaRefusal:
    """Return the error of a call that failed on some replicas.

    Its status is that of the replicas if the call failed on all of them with the same status. Otherwise, it is
    UNAVAILABLE, because a retry may succeed.
    """
    codes = {
        each.code() if isinstance(each, grpc.aio.AioRpcError) else grpc.StatusCode.UNAVAILABLE
        for each in failures.values()
    }
    code = codes.pop() if len(codes) == 1 and not num_done else grpc.StatusCode.UNAVAILABLE
    failed = "; ".join(f"{address} ({_reason(failure)})" for address, failure in sorted(failures.items()))
    advice = ", retry the call" if code is grpc.StatusCode.UNAVAILABLE else ""
    details = f"replicas: {len(failures)} of {len(failures) + num_done} failed{advice}: {failed}"
    return ReplicaRefusal(code, details)


def _is_unimplemented(failure: grpc.aio.AioRpcError | ReplicaLost) -> bool:
    return isinstance(failure, grpc.aio.AioRpcError) and failure.code() is grpc.StatusCode.UNIMPLEMENTED


def _reason(failure: grpc.aio.AioRpcError | ReplicaLost) -> str:
    if isinstance(failure, grpc.aio.AioRpcError):
        return f"{failure.code().name}: {failure.details()}"
    return str(failure)


def _add(total: Message, parts: Sequence[Message]) -> None:
    """Add up messages of one type into an empty one, field by field."""
    for field in total.DESCRIPTOR.fields:
        name, values = field.name, [getattr(part, field.name) for part in parts]
        if name in ("replicas", "sessions"):  # the callers list these
            continue
        if name in _KEY_OF_LIST:
            _add_by_name(getattr(total, name), values, _KEY_OF_LIST[name])
        elif name in _EQUAL_FIELDS:
            _copy_field(total, parts[0], name, is_list=field.is_repeated)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            for each in values:
                for key, number in each.items():
                    getattr(total, name)[key] += number
        elif field.message_type is not None:
            present = [getattr(part, name) for part in parts if part.HasField(name)]
            if present:
                getattr(total, name).SetInParent()
                _add(getattr(total, name), present)
        elif field.is_repeated:
            # Lists of numbers, such as the counts of a histogram, are added up element by element.
            nonempty_lists = [each for each in values if each]
            getattr(total, name).extend(map(sum, zip(*nonempty_lists, strict=True)))
        elif field.type == FieldDescriptor.TYPE_BOOL:
            setattr(total, name, all(values))
        elif name in _MAX_FIELDS:
            setattr(total, name, max(values))
        elif not field.has_presence or all(part.HasField(name) for part in parts):
            setattr(total, name, sum(values))


def _add_by_name(total: Any, values: Sequence[Any], name: str) -> None:
    """Add up the messages of several lists whose field `name` is equal."""
    named: dict[str, list[Message]] = {}
    for each in values:
        for message in each:
            named.setdefault(getattr(message, name), []).append(message)
    for messages in named.values():
        _add(total.add(), messages)


def _copy_field(target: Message, source: Message, name: str, *, is_list: bool) -> None:
    if is_list:
        getattr(target, name).extend(getattr(source, name))
    else:
        setattr(target, name, getattr(source, name))
