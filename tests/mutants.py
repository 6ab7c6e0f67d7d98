"""Small ways to break the project, each of which some test must notice; see `tests/mutation_check.py`."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One way to break the core."""

    file: str
    text: str
    replacement: str


CACHE_MUTANTS = (
    Mutant("block_pool.py", "        del self._free[first:]\n", ""),
    Mutant("block_pool.py", "first = len(self._free) - num_blocks", "first = max(0, len(self._free) - num_blocks)"),
    Mutant("block_pool.py", "if self._states[index].tobytes().count(before) != index.size:", "if False:"),
    Mutant("block_pool.py", "        self.num_published -= block_ids.size\n", ""),
    Mutant("radix_tree.py", "if shared == len(child.tokens):  # a leaf", "if False:  # a leaf"),
    Mutant("radix_tree.py", "if shared == len(first_block):  # the run", "if False:  # the run"),
    Mutant("radix_tree.py", "upper.pin_count = lower.pin_count", "upper.pin_count = 0"),
    Mutant("child_table.py", "if shared > most:", "if shared >= 0:"),
    Mutant("child_table.py", "return keys[index - 1], keys[index]", "return keys[index], keys[index]"),
    Mutant("child_table.py", "            self._order.add(first_block)\n", "            pass\n"),
    Mutant("child_table.py", "            self._order.remove(first_block)\n", "            pass\n"),
    Mutant("token_bytes.py", "    return num_tokens * TOKEN_BYTES", "    return 0"),
    Mutant("token_bytes.py", "return (start + first) * TOKEN_BYTES", "return first * TOKEN_BYTES"),
    Mutant("token_bytes.py", "        start += size\n", "        start += 2 * size\n"),
    Mutant("radix_tree.py", "        leaf.fingerprint = self._fingerprint(tokens, start)\n", ""),
    Mutant(
        "radix_tree.py",
        "removed = leaf.block_ids[num_blocks * BLOCK_ID_BYTES :]",
        "removed = leaf.block_ids[: num_blocks * BLOCK_ID_BYTES]",
    ),
    Mutant("prefix_cache.py", "min(num_bytes, len(tokens) - TOKEN_BYTES) // TOKEN_BYTES", "num_bytes // TOKEN_BYTES"),
    Mutant("prefix_cache.py", "if shared_tokens else None", "if False else None"),
    Mutant("prefix_cache.py", "        self._evictor.pin(insertion.node)\n        self._evictor.unpin(before)\n", ""),
    Mutant("prefix_cache.py", "        if not packed.startswith(insertion.known_block_ids):\n", "        if False:\n"),
    Mutant("prefix_cache.py", "            node.retired_block_ids += insertion.replaced_block_ids\n", ""),
    Mutant("prefix_cache.py", "            self._evictor.count_pinned(node, block_ids.size - replaced.size)\n", ""),
    Mutant(
        "prefix_cache.py",
        "lease.num_published_blocks = insertion.num_known_blocks",
        "lease.num_published_blocks = num_blocks",
    ),
    Mutant(
        "prefix_cache.py", "end = upto_tokens if upto_tokens == lease.num_tokens else whole_tokens", "end = upto_tokens"
    ),
    Mutant("prefix_cache.py", "        if own.size:\n            self.pool.release(own)\n", ""),
    Mutant("prefix_cache.py", "        self._evictor.unpin(lease.node)\n", ""),
    Mutant("evictor.py", "            del self._trees[tree.namespace]\n", "            pass\n"),
    Mutant("evictor.py", "        self._lost.remember(fingerprint, reason)\n", ""),
    Mutant("evictor.py", "MissReason.EXPIRED if leaf.has_expired else MissReason.EVICTED", "MissReason.EVICTED"),
    Mutant("evictor.py", "        self._retained.cut_off(leaf, num_blocks)\n", ""),
    Mutant("evictor.py", "                node.retired_block_ids += node.block_ids\n", ""),
    Mutant("evictor.py", "            self._retained.purged(node)\n", ""),
    Mutant("evictor.py", '            node.block_ids = b""\n', ""),
    Mutant("retention.py", "            node.num_retained_children += sign\n", ""),
    Mutant("retention.py", "- _num_unretained_blocks(node.parent)", ""),
    Mutant("retention.py", "            node.has_expired = was_kept\n", "            node.has_expired = True\n"),
    Mutant("retention.py", "        upper.has_expired = lower.has_expired\n", ""),
    Mutant("retention.py", "        node.has_expired = False\n", ""),
    Mutant("retention.py", "        self._on_cut(node)\n", ""),
    Mutant("retention.py", "min(left, own - usage.num_retained_blocks)", "left"),
    Mutant("prefix_cache.py", " or node.has_expired):", "):"),
    Mutant("retention.py", "self._expiries[0][0] <= now_s", "self._expiries[0][0] < now_s"),
    Mutant("retention.py", "        upper.num_retained_children = int(is_retained(lower))\n", ""),
    Mutant("retention.py", "            self._set_expiry(upper, lower.expiry_entry[0])\n", "            pass\n"),
    Mutant("retention.py", "node.expiry_entry[0] >= expires_s", "node.expiry_entry[0] < expires_s"),
    Mutant("prefix_cache.py", "                self._retained.set(node, DEFAULT_PRIORITY, None)\n", ""),
    Mutant("prefix_cache.py", " or lease.is_revoked:", ":"),
    Mutant("prefix_cache.py", "            self._evictor.requeue(granted)\n", "            pass\n"),
    Mutant("eviction.py", "(node.priority, self._policy.key(node), ", "(50, self._policy.key(node), "),
    Mutant("miss_reason.py", "            self._reasons.popitem(last=False)\n", "            pass\n"),
    Mutant(
        "eviction.py",
        "            (self._outdated if is_outdated else self._entries).remove(node.eviction_entry)\n",
        "",
    ),
    Mutant("prefix_cache.py", "            lease.block_ids = np.concatenate((kept, new))\n", "            pass\n"),
    Mutant("prefix_cache.py", "                lease.num_published_blocks -= 1\n", "                pass\n"),
    Mutant("prefix_cache.py", "        if replaces_last:\n            kept = kept[:-1]\n", ""),
)

ENGINE_MUTANTS = (
    Mutant("single_flight.py", "        shared = shared_bytes(tokens, led, 0)\n", "        shared = len(tokens)\n"),
    Mutant("single_flight.py", "        self._leaders.setdefault(fingerprint, request)\n", "        pass\n"),
    Mutant("single_flight.py", " or leader.namespace != request.namespace", ""),
    Mutant("single_flight.py", "        self._lead_no_more(leader, lead)\n", ""),
    Mutant("single_flight.py", "            del self._first_blocks[first_block]\n", "            pass\n"),
    Mutant("single_flight.py", "            self._followers[wait.leader].remove(request)\n", "            pass\n"),
    Mutant(
        "admission.py", "        if params.read_cache and self._flights.follow(", "        if self._flights.follow("
    ),
    Mutant("admission.py", "            request.cached_tokens = lease.cached_tokens\n", ""),
    Mutant("admission.py", "max(0, request.computed_upto - lease.cached_tokens)", "0"),
    Mutant(
        "admission.py", "        if num_growing and self._num_available_blocks() < num_growing:", "        if False:"
    ),
    Mutant("admission.py", "            lease.close()\n", "            pass\n"),
    Mutant("admission.py", "Admission.NO_ROOM if running and", "Admission.NO_ROOM if False and"),
    Mutant("admission.py", " and not request.is_revoked and ", " and "),
    Mutant("scheduler.py", "            self._queues[request.params.tenant].charge(granted)\n", ""),
    Mutant("scheduler.py", "queue.num_passed_over >= _MAX_PASSED_OVER or ", ""),
    Mutant("scheduler.py", "max(equals, key=lambda look: look[1])", "min(equals, key=lambda look: look[1])"),
    Mutant("scheduler.py", "                self._blocked = request\n", "                pass\n"),
    Mutant("scheduler.py", " and not self._ends_with(request, tokens, left)):", "):"),
    Mutant("scheduler.py", "if not left or tokens >= self._left(first):", "if not left:"),
    Mutant("scheduler.py", "turn // _SHORT_SHARE", "0"),
    Mutant("scheduler.py", "        self._decode(decoding[:most])\n", "        self._decode([])\n"),
    Mutant("scheduler.py", "admitter.urgent_tokens(request) - ", "request.num_left - "),
    Mutant("scheduler.py", "        if self._blocked is request:\n            self._blocked = None\n", ""),
    Mutant("tenant_queue.py", "tokens / self.weight", "tokens"),
    Mutant("tenant_queue.py", "max(self._fair_share, self._served_before.pop(tenant, 0.0))", "self._fair_share"),
    Mutant("tenant_queue.py", "served = max(self._fair_share, self", "served = max(0.0, self"),
    Mutant("request.py", "self.received_s - self.params.priority", "self.received_s"),
    Mutant("request.py", "if self.token_ids and self.token_ids[-1] in self.stop_token_ids:", "if False:"),
    Mutant("engine_core.py", "        _open_lease(request).copy = None  # it was made\n", ""),
    Mutant("engine_core.py", "publishable > _open_lease(request).committed_tokens", "is_first"),
    Mutant(
        "engine_core.py",
        "        _open_lease(request).close()\n        request.lease = None\n",
        "        request.lease = None\n",
    ),
    Mutant("engine_core.py", "key=lambda holder: holder.arrival,", "key=lambda holder: -holder.arrival,"),
    Mutant("departures.py", "            self._deadlines.remove(", "            len("),
    Mutant("departures.py", "            if not request.is_over:\n", "            if False:\n"),
    Mutant("prediction.py", "generation.sampling.temperature > 0", "False"),
    Mutant("prediction.py", "probabilities.cumsum(dim=0) - probabilities >=", "probabilities.cumsum(dim=0) >="),
    Mutant("prediction.py", "position=request.num_tokens", "position=0"),
    Mutant("tenant_queue.py", "max(self._fair_share + tokens / weights, least_served)", "least_served"),
    Mutant("scheduler.py", "if num_free <= 0 or not queue.running:", "if True:"),
    Mutant("scheduler.py", "if len(decoding) > most:", "if False:"),
    Mutant("admission.py", " and self._can_fit(request) else", " else"),
    Mutant("engine_core.py", "upto if is_first else ", "upto if request.num_left > 0 else "),
    Mutant("engine_core.py", "0 if any(each.is_finite for each in computed) else self.num_failed_steps + 1", "0"),
    Mutant("engine_core.py", "are_others or self._scheduler.num_running > num_requests", "are_others"),
    Mutant("engine_core.py", "len(generation.token_ids) > 1 and ", ""),
    Mutant("engine_core.py", "is_expired or are_others or is_anybody_due or ", "are_others or is_anybody_due or "),
    Mutant("engine_core.py", "are_others or is_anybody_due or ", "is_anybody_due or "),
    Mutant("engine_core.py", "is_anybody_due or self._has_news()", "self._has_news()"),
    Mutant("departures.py", "self._cancelled or self._failed or (", "self._failed or ("),
    Mutant("departures.py", "self._cancelled or self._failed or (", "self._cancelled or ("),
    Mutant("departures.py", "self._failed or (self._deadlines and self._deadlines[0][0] <= now_s)", "self._failed"),
    Mutant("engine_core.py", " or self._has_news())", ")"),
    Mutant("engine_core.py", "        if self._departures.is_failing(request):\n            return\n", ""),
)
