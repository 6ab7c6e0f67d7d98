"""Small ways to break the project, each of which some test must notice. `mutation_check.py` runs them."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One way to break the core."""

    file: str
    text: str
    replacement: str


CACHE_MUTANTS = (
    Mutant("cache/evictor.py", "takeable = num_available - num_spared_blocks", "takeable = num_available"),
    Mutant(
        "cache/ledger.py",
        "max(num_kept_blocks, num_spared_blocks)",
        "num_kept_blocks",
    ),
    Mutant("cache/block_pool.py", "        self.num_free -= num_blocks\n", ""),
    Mutant("cache/block_pool.py", "if num_blocks > self.num_free:", "if False:"),
    Mutant("cache/block_pool.py", "                self._lengths[runs] -= taken\n", ""),
    Mutant("cache/block_pool.py", "if not self._states[block_ids].any():", "if True:"),
    Mutant("cache/block_pool.py", "left = min(room, spare)", "left = 0"),
    Mutant("cache/block_pool.py", "            self._noted.frombytes(block_ids.tobytes())\n", ""),
    Mutant("cache/block_pool.py", "        self._start += skipped\n", ""),
    Mutant("cache/block_pool.py", "if block_ids.size > self.num_free:", "if False:"),
    Mutant("cache/ledger.py", "after = int(lease.block_ids[-1]) if lease.block_ids.size else None", "after = None"),
    Mutant("cache/ledger.py", "return num_expected_blocks + 1 - num_blocks if", "return 0 if"),
    Mutant("cache/block_pool.py", "if self._states[index].tobytes().count(before) != index.size:", "if False:"),
    Mutant("cache/block_pool.py", "        self.num_published -= block_ids.size\n", ""),
    Mutant("cache/tree/radix_tree.py", "if shared == len(child.tokens):  # a leaf", "if False:  # a leaf"),
    Mutant("cache/tree/radix_tree.py", "if shared == len(first_block):  # the run", "if False:  # the run"),
    Mutant("cache/tree/radix_tree.py", "upper.num_holds = int(lower.num_holds > 0)", "upper.num_holds = 0"),
    Mutant("cache/tree/child_table.py", "if shared > most:", "if shared >= 0:"),
    Mutant("cache/tree/child_table.py", "return keys[index - 1], keys[index]", "return keys[index], keys[index]"),
    Mutant("cache/tree/child_table.py", "            self._order.add(first_block)\n", "            pass\n"),
    Mutant("cache/tree/child_table.py", "            self._order.remove(first_block)\n", "            pass\n"),
    Mutant("tokens.py", "    return num_tokens * TOKEN_BYTES", "    return 0"),
    Mutant("tokens.py", "return (start + first) * TOKEN_BYTES", "return first * TOKEN_BYTES"),
    Mutant("tokens.py", "        start += size\n", "        start += 2 * size\n"),
    Mutant("cache/tree/radix_tree.py", "        leaf.fingerprint = self._fingerprint(tokens, start)\n", ""),
    Mutant(
        "cache/tree/radix_tree.py",
        "removed = leaf.block_ids[num_blocks * BLOCK_ID_BYTES :]",
        "removed = leaf.block_ids[: num_blocks * BLOCK_ID_BYTES]",
    ),
    Mutant("cache/ledger.py", "min(num_bytes, len(tokens) - TOKEN_BYTES) // TOKEN_BYTES", "num_bytes // TOKEN_BYTES"),
    Mutant("cache/ledger.py", "if shared_tokens else None", "if False else None"),
    Mutant(
        "cache/ledger.py",
        "        self._pins.pin(insertion.node)\n        if before is not None:\n            self._pins.unpin(before)\n",
        "",
    ),
    Mutant("cache/ledger.py", "        if not packed.startswith(insertion.known_block_ids):\n", "        if False:\n"),
    Mutant("cache/ledger.py", "            node.retired_block_ids += insertion.replaced_block_ids\n", ""),
    Mutant("cache/ledger.py", "            self._pins.count(node, num_more_blocks)\n", ""),
    Mutant(
        "cache/ledger.py",
        "lease.num_published_blocks = insertion.num_known_blocks",
        "lease.num_published_blocks = num_blocks",
    ),
    Mutant(
        "cache/ledger.py", "end = upto_tokens if upto_tokens == lease.num_tokens else whole_tokens", "end = upto_tokens"
    ),
    Mutant("cache/ledger.py", "        if own.size:\n            self._pool.release(own)\n", ""),
    Mutant("cache/ledger.py", "            self._pins.unpin_and_join(lease.node)\n", "            pass\n"),
    Mutant("cache/evictor.py", "            del self._trees[tree.owner.namespace]\n", "            pass\n"),
    Mutant("cache/evictor.py", "fingerprint_after(leaf, num_kept_blocks) if", "fingerprint_after(leaf, 0) if"),
    Mutant("cache/evictor.py", "MissReason.EXPIRED if leaf.has_expired else MissReason.EVICTED", "MissReason.EVICTED"),
    Mutant(
        "cache/evictor.py", "        self._changes.evicted(leaf, num_blocks, fingerprint, reason, self._clock())\n", ""
    ),
    Mutant("cache/evictor.py", "                node.retired_block_ids += node.block_ids\n", ""),
    Mutant("cache/evictor.py", "            self._changes.purged(node)\n", ""),
    Mutant("cache/evictor.py", '            node.block_ids = b""\n', ""),
    Mutant("cache/tenants.py", "for _ in range(_FORGOTTEN_AT_ONCE):", "for _ in range(1):"),
    Mutant("cache/tenants.py", "            if not self._is_idle(value):\n", "            if False:\n"),
    Mutant("cache/tenants.py", "            self._others.move_to_end(tenant)\n", ""),
    Mutant("cache/tenants.py", "            self._others.forget_idle()\n", ""),
    Mutant("cache/retained_nodes.py", "            node.num_retained_children += sign\n", ""),
    Mutant("cache/retained_nodes.py", "- _num_unretained_blocks(node.parent)", ""),
    Mutant(
        "cache/retained_nodes.py", "            node.has_expired = was_kept\n", "            node.has_expired = True\n"
    ),
    Mutant("cache/retained_nodes.py", "        upper.has_expired = lower.has_expired\n", ""),
    Mutant("cache/retained_nodes.py", "        node.has_expired = False\n", ""),
    Mutant("cache/prefix_cache.py", "        self._changes.cut(node)\n", ""),
    Mutant("cache/retained_nodes.py", "min(left, own - usage.num_retained_blocks)", "left"),
    Mutant("cache/ledger.py", " or node.has_expired:", ":"),
    Mutant("cache/ledger.py", "        self._changes.grown(node, num_more_blocks, self._clock())\n", ""),
    Mutant("cache/ledger.py", "            self._changes.inserted(node, self._clock())\n", ""),
    Mutant(
        "cache/ledger.py",
        "            self._changes.split(insertion.split, lease.node_used_s, self._clock())\n",
        "            pass\n",
    ),
    Mutant("cache/changes.py", "is not ours)", "is ours)"),
    Mutant("cache/retained_nodes.py", "self._expiries[0][0] > now_s", "self._expiries[0][0] >= now_s"),
    Mutant("cache/retained_nodes.py", "        upper.num_retained_children = int(is_retained(lower))\n", ""),
    Mutant(
        "cache/retained_nodes.py", "            self._set_expiry(upper, lower.expiry_entry[0])\n", "            pass\n"
    ),
    Mutant("cache/retained_nodes.py", "node.expiry_entry[0] >= expires_s", "node.expiry_entry[0] < expires_s"),
    Mutant("cache/ledger.py", "            self._retained.end_after(node, num_old_blocks)\n", "            pass\n"),
    Mutant("cache/ledger.py", " or lease.is_revoked:", ":"),
    Mutant("cache/prefix_cache.py", "            self._lines.requeue(each)\n", "            pass\n"),
    Mutant("cache/eviction_lines.py", "(node.priority, self._policy.key(node), ", "(50, self._policy.key(node), "),
    Mutant("cache/lost_prefixes.py", "            self._reasons.popitem(last=False)\n", "            pass\n"),
    Mutant(
        "cache/eviction_lines.py",
        "            (self._outdated if is_outdated else self._entries).remove(node.eviction_entry)\n",
        "",
    ),
    Mutant("cache/ledger.py", "        lease.block_ids = block_ids\n", ""),
    Mutant("cache/ledger.py", "            lease.num_published_blocks -= 1\n", "            pass\n"),
    Mutant("cache/ledger.py", "            kept = np.delete(kept, last)\n", "            pass\n"),
    Mutant("cache/ledger.py", "lease.num_published_blocks > last", "lease.num_published_blocks == kept.size > last"),
    Mutant("cache/ledger.py", "        if num_tokens <= lease.num_tokens:\n            return\n", ""),
    Mutant("cache/ledger.py", "        if not num_new_blocks and not replaces_last:", "        if not num_new_blocks:"),
)

ENGINE_MUTANTS = (
    Mutant("engine/calls/lanes.py", "popitem(last=False)", "popitem()"),
    Mutant("engine/calls/lanes.py", "        if lane:\n            self._lanes[tenant] = lane\n", ""),
    Mutant("engine/calls/lanes.py", "        self._num_calls -= 1\n", ""),
    Mutant("engine/calls/lanes.py", ".appendleft(call)", ".append(call)"),
    Mutant("engine/calls/inbox.py", "self._run_call() and self._clock() < end_s", "self._run_call()"),
    Mutant("engine/calls/inbox.py", "            self._turns.rotate(-1)\n", ""),
    Mutant(
        "engine/calls/inbox.py",
        "            return False\n        self._run_functions()\n",
        "            return False\n",
    ),
    Mutant(
        "engine/calls/inbox.py",
        "return self._functions.empty() and not self._has_calls",
        "return self._functions.empty()",
    ),
    Mutant(
        "scheduling/single_flight.py",
        "        shared = shared_bytes(tokens, led, 0)\n",
        "        shared = len(tokens)\n",
    ),
    Mutant("scheduling/single_flight.py", "        self._leaders.setdefault(fingerprint, request)\n", "        pass\n"),
    Mutant("scheduling/single_flight.py", " or leader.namespace != request.namespace", ""),
    Mutant("scheduling/single_flight.py", "        self._lead_no_more(leader, lead)\n", ""),
    Mutant("scheduling/single_flight.py", "            del self._first_blocks[first_block]\n", "            pass\n"),
    Mutant(
        "scheduling/single_flight.py",
        "            self._followers[wait.leader].remove(request)\n",
        "            pass\n",
    ),
    Mutant(
        "scheduling/admission.py",
        "        if params.read_cache and self._flights.follow(",
        "        if self._flights.follow(",
    ),
    Mutant("scheduling/admission.py", "            request.cached_tokens = lease.cached_tokens\n", ""),
    Mutant("scheduling/admission.py", "max(0, request.computed_upto - lease.cached_tokens)", "0"),
    Mutant("scheduling/admission.py", "num_spared_blocks=num_growing,\n", "num_spared_blocks=0,\n"),
    Mutant("scheduling/admission.py", "num_growing = 0 if is_passing else sum(", "num_growing = sum("),
    Mutant("scheduling/admission.py", "Admission.NO_ROOM if running and", "Admission.NO_ROOM if False and"),
    Mutant("scheduling/admission.py", " and not request.is_revoked and ", " and "),
    Mutant("scheduling/step_plan.py", "            self._queues[request.tenant].charge(granted)\n", ""),
    Mutant("scheduling/step_plan.py", "queue.num_passed_over >= _MAX_PASSED_OVER or ", ""),
    Mutant("scheduling/step_plan.py", "max(equals, key=lambda look: look[1])", "min(equals, key=lambda look: look[1])"),
    Mutant("scheduling/step_plan.py", "                self.blocked = request\n", "                pass\n"),
    Mutant("scheduling/step_plan.py", " and not self._ends_with(request, left)):", " and False):"),
    Mutant("scheduling/step_plan.py", "if not left or tokens >= self._left(first):", "if not left:"),
    Mutant("scheduling/step_plan.py", "turn // _SHORT_SHARE", "0"),
    Mutant("scheduling/step_plan.py", "        self._decode(decoding[:most])\n", "        self._decode([])\n"),
    Mutant("scheduling/step_plan.py", "self._admitter.urgent_tokens(each) - ", "each.num_left - "),
    Mutant("scheduling/scheduler.py", "        if self._blocked is request:\n            self._blocked = None\n", ""),
    Mutant("scheduling/tenant_queue.py", "tokens / self.weight", "tokens"),
    Mutant(
        "scheduling/tenant_queue.py", "max(self._fair_share, self._served_before.pop(tenant, 0.0))", "self._fair_share"
    ),
    Mutant("scheduling/tenant_queue.py", "served = max(self._fair_share, self", "served = max(0.0, self"),
    Mutant("scheduling/request.py", "self.received_s - self.params.urgency", "self.received_s"),
    Mutant("scheduling/request.py", "if self.token_ids and self.token_ids[-1] in self.stop_token_ids:", "if False:"),
    Mutant("engine/delivery.py", "        request.open_lease.copy = None  # the step has made it\n", ""),
    Mutant("engine/delivery.py", "publishable > request.open_lease.committed_tokens", "is_first"),
    Mutant(
        "engine/growth.py",
        "        request.open_lease.close()\n        request.lease = None\n",
        "        request.lease = None\n",
    ),
    Mutant("engine/growth.py", "key=lambda holder: holder.arrival,", "key=lambda holder: -holder.arrival,"),
    Mutant("engine/early_ends.py", "            self._deadlines.remove(", "            len("),
    Mutant("engine/early_ends.py", "        self._failed.pop(request, None)\n", ""),
    Mutant("engine/step.py", "        del self._wait", "        pass"),
    Mutant("engine/step.py", "        traceback.clear_frames(error.__traceback__)", "        pass"),
    Mutant("engine/early_ends.py", "            if not request.is_over:\n", "            if False:\n"),
    Mutant("engine/sampler.py", " and not request.generation.sampling.takes_most_likely", " and False"),
    Mutant("engine/sampler.py", "probabilities.cumsum(dim=0) - probabilities >=", "probabilities.cumsum(dim=0) >="),
    Mutant("engine/sampler.py", "position=request.num_tokens", "position=0"),
    Mutant("scheduling/tenant_queue.py", "max(self._fair_share + tokens / weights, least_served)", "least_served"),
    Mutant("scheduling/step_plan.py", "if num_free <= 0 or not queue.running:", "if True:"),
    Mutant("scheduling/step_plan.py", "if len(decoding) > most:", "if False:"),
    Mutant("scheduling/admission.py", " and self._can_fit(request) else", " else"),
    Mutant("engine/delivery.py", "upto if is_first else ", "upto if request.num_left > 0 else "),
    Mutant("engine/core.py", "0 if any(each.is_finite for each in computed) else self.num_failed_steps + 1", "0"),
    Mutant("engine/steps_ahead.py", "if scheduler.num_running > len(slices):", "if False:"),
    Mutant(
        "engine/steps_ahead.py", "not scheduler.is_full and (scheduler.num_waiting or ", "not scheduler.is_full and ("
    ),
    Mutant("engine/steps_ahead.py", "if not scheduler.is_full and (", "if ("),
    Mutant(
        "scheduling/scheduler.py", "self._max_running_requests and not any(", "self._max_running_requests or not any("
    ),
    Mutant("scheduling/scheduler.py", "[request.tenant].charge(1)\n", "[request.tenant].charge(0)\n"),
    Mutant("engine/steps_ahead.py", "if not self._runner.is_asynchronous or ", "if "),
    Mutant("engine/steps_ahead.py", "len(computed) == len(next_step.slices) and ", ""),
    Mutant("engine/steps_ahead.py", "each.is_finite and each.refusal is None for", "each.refusal is None for"),
    Mutant("engine/steps_ahead.py", "each.is_finite and each.refusal is None for", "each.is_finite for"),
    Mutant("engine/steps_ahead.py", " and all(_decodes_on(each.part.request) for each in computed)", ""),
    Mutant("engine/steps_ahead.py", "go_on and not self._is_anything_else_due(next_step.slices)", "go_on"),
    Mutant("engine/steps_ahead.py", "request.open_lease.reserve(end + 1)", "request.open_lease.reserve(end)"),
    Mutant("engine/steps_ahead.py", "or not request.is_decoding or ", "or "),
    Mutant("engine/steps_ahead.py", " or generation.finish_reason is not None:", ":"),
    Mutant("engine/steps_ahead.py", ", num_coming=1)", ")"),
    Mutant(
        "engine/core.py",
        "        slices = self._scheduler.next_tokens()\n        assert",
        "        slices = next_step.slices\n        assert",
    ),
    Mutant("engine/core.py", "next_step.start(computed, self._clock())", "next_step.start(computed, 0.0)"),
    Mutant(
        "engine/steps_ahead.py",
        "        except CapacityError:\n            return None\n        try",
        "        finally:\n            pass\n        try",
    ),
    Mutant("engine/steps_ahead.py", "return is_expired or ", "return "),
    Mutant("engine/steps_ahead.py", "return is_expired or self._early_ends.is_any_due(now_s)", "return is_expired"),
    Mutant("engine/step.py", "_chunk(part), copy=None,", "_chunk(part),"),
    Mutant("engine/early_ends.py", "self._cancelled or self._finished or self", "self._finished or self"),
    Mutant("engine/early_ends.py", "self._cancelled or self._finished or self", "self._cancelled or self"),
    Mutant("engine/early_ends.py", "self._finished or self._failed)", "self._finished)"),
    Mutant("engine/early_ends.py", "return is_late or bool(", "return bool("),
    Mutant("engine/early_ends.py", " and request.generation.token_ids:", ":"),
    Mutant("engine/delivery.py", "            self._commit(request, request.computed_upto)\n", "            pass\n"),
    Mutant("engine/delivery.py", "request.generation.is_finished = True", "pass"),
    Mutant("engine/early_ends.py", "request.is_over or self.is_failing(request)", "request.is_over"),
    Mutant("engine/sampler.py", "torch.where(scores > 0, scores / factor, scores * factor)", "scores / factor"),
    Mutant("engine/sampler.py", "ordered.masked_fill(ordered < last, -torch.inf)", "ordered"),
    Mutant("engine/sampler.py", "len(token_ids) < sampling.min_tokens", "len(token_ids) <= sampling.min_tokens"),
    Mutant("engine/sampler.py", "sampling.presence_penalty + sampling.frequency_penalty", "sampling.frequency_penalty"),
    Mutant("engine/steps_ahead.py", " or self._has_news()", ""),
    Mutant("engine/delivery.py", "told += prompt_logprobs[len(told) - start :]", "told += prompt_logprobs"),
    Mutant("engine/step.py", "upto = min(end, request.params.num_tokens - 1)", "upto = end - 1"),
    Mutant("engine/step.py", "rows = [end - 1 for", "rows = [end - end for"),
    Mutant("scheduling/step_plan.py", "            self._logit_rows -= granted\n", ""),
    Mutant("engine/delivery.py", "        if self._early_ends.is_failing(request):\n            return\n", ""),
)

KERNEL_MUTANTS = (
    Mutant(
        "kernels/shared_prefix.py",
        "np.minimum(same_blocks // blocks_a_unit, np.minimum(ordered[1:], ordered[:-1]))",
        "same_blocks // blocks_a_unit",
    ),
    Mutant("kernels/shared_prefix.py", "        if common > start:\n", "        if True:\n"),
    Mutant(
        "kernels/cpu_attention_plan.py",
        "    is_in_place &= (by_unit[:, 1:] - by_unit[:, :-1] == 1).all(axis=1)\n",
        "",
    ),
    Mutant("kernels/cpu_attention_plan.py", " == 1) & is_in_place[1:]\n", " == 1)\n"),
    Mutant("kernels/cpu_attention_plan.py", "np.where(num_units[1:] == num_units[:-1], same_parts, 0)", "same_parts"),
    Mutant(
        "kernels/cpu_attention_plan.py",
        "in_table = np.minimum(places, (kv_lens - 1) // block_size)",
        "in_table = places",
    ),
    Mutant("kernels/cpu_attention_plan.py", "return 0 if demand.is_whole else", "return"),
    Mutant(
        "kernels/cpu_attention_plan.py", "first_piece = int(num_units[first]) + first_own", "first_piece = first_own"
    ),
    Mutant(
        "kernels/cpu_attention_work.py", "            is_hidden |= keys <= positions - window\n", "            pass\n"
    ),
    Mutant("kernels/cpu_attention.py", '    lses[:-1, :, :num_rows] = float("-inf")\n', ""),
    Mutant("kernels/cpu_attention.py", "        kv.index_fill_(2, tails.unwritten, 0)\n", "        pass\n"),
    Mutant("kernels/cpu_attention.py", "    return merged.add_(tail.float().mul_(shares[-1]))", "    return merged"),
    Mutant("kernels/row_tiles.py", "(0, 0, 0, padding)", "(0, 0, padding, 0)"),
    Mutant("kernels/product_trial.py", "            if not agrees(whole):\n                continue\n", ""),
    Mutant("kernels/product_trial.py", "expected[:size], expected[-size:], expected[order[:size]]", "answers"),
)

EVENT_MUTANTS = (
    Mutant("events/stored_blocks.py", "self._copies[block] = copies + 1", "self._copies[block] = 1"),
    Mutant("events/stored_blocks.py", "            if self._copies[block] > 1:\n", "            if False:\n"),
    Mutant("events/stored_blocks.py", "(run.phase + num_kept_tokens) // self", "num_kept_tokens // self"),
    Mutant("events/stored_blocks.py", "lower.phase = num_tokens % self._block_size", "lower.phase = 0"),
    Mutant("events/stored_blocks.py", "        lower.before = upper.end\n", ""),
    Mutant("events/stored_blocks.py", "if is_purged and self.num_blocks == 0:", "if is_purged:"),
    Mutant("events/stored_blocks.py", "            max_blocks -= 1\n", ""),
    Mutant("events/tree_feed.py", "tail = above.tokens[-(size - len(tail)) :] + tail", "tail = above.tokens"),
    Mutant("events/tree_feed.py", "if self._asking and not self._changes:", "if self._asking:"),
    Mutant("events/tree_feed.py", "            self._note((node,))\n", "            pass\n"),
    Mutant("events/event_log.py", "if not self.first - 1 <= after <= self.last:", "if False:"),
    Mutant("events/event_log.py", " or batch.sequence_number != number + 1:", ":"),
    Mutant("events/block_identity.py", '(self._tenant, "", "")', '(namespace.tenant, "", "")'),
    Mutant("events/readers.py", "        self._is_waking = False  #", "        pass  #"),
)
