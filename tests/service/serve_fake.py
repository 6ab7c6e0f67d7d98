"""The `radixkv` command with a fake engine: `python serve_fake.py GATE serve --port 0`.

GATE is `open`, or `shut`: then requests run until SIGUSR1 comes or until they are cancelled.
"""

import signal
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.service.fake_engine import FakeEngine


def build_engine(config, observers, progress):
    """Stand in for `radixkv.startup.build_engine.build_engine`."""
    engine = FakeEngine(is_gated=sys.argv[1] == "shut")
    signal.signal(signal.SIGUSR1, lambda *_: engine.open_gate())
    return engine


if __name__ == "__main__":
    stand_in = types.ModuleType("radixkv.startup.build_engine")
    stand_in.build_engine = build_engine
    sys.modules["radixkv.startup.build_engine"] = stand_in
    from radixkv.service.cli.main import main

    sys.exit(main(sys.argv[2:]))
