"""The `radixkv` command with a fake engine: `python serve_fake.py GATE serve --port 0`.

GATE is one of
- `open`: requests are answered at once,
- `shut`: requests run until the process receives SIGUSR1 or until they are cancelled,
- `slow`: like `shut`, and the engine does not stop before the process receives SIGUSR1.
"""

import signal
import sys
import time
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.service.fake_engine import FakeEngine


class SlowEngine(FakeEngine):
    """An engine that stops only when its gate is opened."""

    def stop(self):
        print("the engine stops", file=sys.stderr, flush=True)
        while self.is_gated:
            time.sleep(0.001)


def build_engine(config, observers, progress):
    """Stand in for `radixkv.startup.build_engine.build_engine`."""
    engine = SlowEngine(is_gated=True) if sys.argv[1] == "slow" else FakeEngine(is_gated=sys.argv[1] == "shut")
    signal.signal(signal.SIGUSR1, lambda *_: engine.open_gate())
    return engine


if __name__ == "__main__":
    stand_in = types.ModuleType("radixkv.startup.build_engine")
    stand_in.build_engine = build_engine
    sys.modules["radixkv.startup.build_engine"] = stand_in
    from radixkv.service.cli.main import main

    sys.exit(main(sys.argv[2:]))
