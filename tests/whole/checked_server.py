"""Runs `radixkv serve` with an audit of the cache four times per second and at the end.

The result of the audit is the last line on stdout. The address of the metrics port, if there is one, is printed on
stderr.

    python -m tests.whole.checked_server --set cache.capacity_tokens=8192
"""

from __future__ import annotations

import sys
import threading

from radixkv.config import Config
from radixkv.engine.engine import Engine
from radixkv.service.server.metrics_port import Telemetry
from radixkv.service.server.server import run
from radixkv.startup.build_engine import build_engine

_AUDIT_PERIOD_S = 0.25


def audit_repeatedly(engine: Engine, is_over: threading.Event) -> None:
    """Audit the cache until the event is set. If an audit fails, print its error on stdout and audit no more."""
    while not is_over.wait(_AUDIT_PERIOD_S):
        if engine.is_healthy:
            try:
                engine.check().result()
            except Exception as error:
                print(f"check failed: {error!r}", flush=True)
                raise


def main(arguments: list[str]) -> None:
    """Serve until SIGTERM. The arguments are settings, each after a `--set`."""
    settings = arguments[1::2]
    config = Config.load(settings=["server.port=0", *settings])
    telemetry = Telemetry(config)
    with telemetry.serving() as metrics_address:
        if metrics_address is not None:
            print(f"metrics on {metrics_address}", file=sys.stderr, flush=True)
        engine = build_engine(config, telemetry.observers)
        telemetry.watch(engine)
        is_over = threading.Event()
        thread = threading.Thread(target=audit_repeatedly, args=(engine, is_over))
        thread.start()
        run(engine, config.server, config.model.path, config, telemetry.count_refusal)
        is_over.set()
        thread.join()
    cache = engine._core.cache
    cache.check()
    print(f"check passed, {cache.pool.num_leased} leased, {cache.num_pinned_blocks} pinned", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
