"""Breaks the cache core in small ways, one at a time, and runs its tests on each: every mutant must be caught.

    python -m tests.mutation_check

A mutant is a text that stands exactly once in its file, and what it is replaced with. When the code changes, the
check says which mutant no longer applies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
TESTS = (
    "tests/test_block_pool.py",
    "tests/test_token_bytes.py",
    "tests/test_child_table.py",
    "tests/test_radix_tree.py",
    "tests/test_lease.py",
    "tests/test_eviction.py",
    "tests/test_miss_reason.py",
    "tests/test_prefix_cache.py",
    "tests/test_retention.py",
    "tests/test_purge.py",
    "tests/test_child_table.py",
    "tests/test_eviction_policies.py",
    "tests/test_cache_stress.py",
)


class Mutant(NamedTuple):
    """One way to break the core."""

    file: str
    text: str
    replacement: str


MUTANTS = (
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
)


def is_caught(mutant: Mutant) -> bool:
    """Whether the tests fail on a copy of the project with this mutant in it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("radixkv", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "radixkv" / mutant.file
        source = path.read_text(encoding="utf-8")
        if source.count(mutant.text) != 1:
            raise SystemExit(f"{mutant.file}: expected exactly one {mutant.text!r}, got {source.count(mutant.text)}")
        path.write_text(source.replace(mutant.text, mutant.replacement), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            ended = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=120, check=False)
        except subprocess.TimeoutExpired:
            return True
        return ended.returncode == 1  # tests ran and failed; anything else is a mistake of the check itself


def main() -> int:
    """Run every mutant; 1 if one survives."""
    survivors = 0
    for mutant in MUTANTS:
        caught = is_caught(mutant)
        survivors += not caught
        print(f"{'caught  ' if caught else 'SURVIVED'} {mutant.file}: {mutant.text.strip()}", flush=True)
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} mutants caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
