"""Passes requests that end to the accounts of their tenants, from which statements are made."""

from __future__ import annotations

from radixkv.cache.tenant_ledger import TenantLedger
from radixkv.engine.observer import Observer
from radixkv.scheduling.request import Outcome, Request
from radixkv.statements.quota_shadow import QuotaShadows, ShadowRequest


class StatementFeed(Observer):
    """Adds the tokens of each request to the account of its tenant, and passes the request to the tenant's shadows.

    A request counts in full once it has its first token, even if it is aborted or fails afterwards. For a request that
    ends before its first token, only its computed and its published prompt tokens count.

    Args:
        ledger: the accounts.
        shadows: estimate what twice a tenant's ceiling would have saved; None without them.
    """

    def __init__(self, ledger: TenantLedger, shadows: QuotaShadows | None = None) -> None:
        self._ledger = ledger
        self._shadows = shadows

    def request_ended(self, request: Request, outcome: Outcome, error: Exception | None, now_s: float) -> None:
        """Account the tokens of a request, and pass the request to the shadows if it had its first token."""
        usage = request.usage
        if request.times.prefilled_s is not None:
            counts = {
                "requests": 1,
                "computed_tokens": usage.computed_tokens,
                "generated_tokens": usage.generated_tokens,
                "written_tokens": usage.written_tokens,
                "device_hit_tokens": usage.device_tokens,
                "host_hit_tokens": usage.host_tokens,
                "disk_hit_tokens": usage.disk_tokens,
                "remote_hit_tokens": usage.remote_tokens,
            }
        elif request.has_computed:
            # After a preemption, `computed_upto` may be less than the tokens that were computed.
            computed_tokens = max(0, request.computed_upto - usage.cached_tokens)
            counts = {"computed_tokens": computed_tokens, "written_tokens": usage.written_tokens}
        else:
            return
        self._ledger.count(request.tenant, {name: count for name, count in counts.items() if count})
        if self._shadows is not None and request.times.prefilled_s is not None and self._shadows.has(request.tenant):
            self._shadows.put(request.tenant, _shadow_request(request))


def _shadow_request(request: Request) -> ShadowRequest:
    params, generation = request.params, request.generation
    writes_all = generation is None or generation.sampling.write_generated
    num_written_tokens = request.num_tokens if writes_all else request.num_prompt_tokens
    return ShadowRequest(
        seed=request.namespace.seed,
        tokens=request.tokens if writes_all else request.prompt_tokens,
        num_read_tokens=request.num_prompt_tokens if params.read_cache else 0,
        num_written_tokens=num_written_tokens if params.write_cache else 0,
    )
