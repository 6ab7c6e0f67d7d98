"""Accounts the tokens of requests for statements."""

from __future__ import annotations

from radixkv.cache.tenant_ledger import TenantLedger
from radixkv.engine.observer import Observer
from radixkv.scheduling.request import Outcome, Request


class RequestMeter(Observer):
    """Adds the tokens of each request to the account of its tenant when the request ends.

    A request counts in full once it has its first token, even if it is aborted or fails afterwards. For a request that
    ends before its first token, only its computed and its published prompt tokens count.

    Args:
        ledger: the accounts.
    """

    def __init__(self, ledger: TenantLedger) -> None:
        self._ledger = ledger

    def request_ended(self, request: Request, outcome: Outcome, error: Exception | None, now_s: float) -> None:
        """Account the tokens of a request."""
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
